//! The reporting-queue core against a hostile guest. `cargo +nightly fuzz run reporting_queue`.

#![no_main]

#[path = "../src/model.rs"]
mod model;
#[path = "../src/scenario.rs"]
mod scenario;

libfuzzer_sys::fuzz_target!(|input: &[u8]| scenario::play(input));
