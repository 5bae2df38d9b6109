//! `/metrics`: every field of [`crate::fields`] for Prometheus.
//!
//! Started by `serve` where the configuration asks for it; off otherwise. [`text`] writes what a status says, [`http`]
//! answers scrapers. Nobody who connects is trusted with more than reading: no request changes anything, and clients
//! are limited in number, size and time.
//!
//! A scrape asks each VM's task for its figures, as `status` does, and writes the text on a thread for blocking work, so
//! that no VM waits for it. Scrapes within a second of each other get the same text.

mod address;
mod http;
mod text;

pub use address::{AddressError, MetricsAddress};
pub use http::{BindError, Listener, serve};
pub use text::{Format, text};
