//! Where `/metrics` is served: `127.0.0.1:19719`, `[::1]:19719` or `unix:/run/fpr/metrics.sock`.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

/// A TCP address or the path of a Unix socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetricsAddress {
    /// An address of this host and a port.
    Tcp(SocketAddr),
    /// A Unix socket, made with mode 0660.
    Unix(PathBuf),
}

/// Why a text is no such address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is no address: use IP:PORT, such as 127.0.0.1:19719, or unix:/PATH, such as unix:/run/fpr/metrics.sock"
)]
pub struct AddressError {
    text: String,
}

impl FromStr for MetricsAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let error = || AddressError { text: text.to_owned() };
        match text.strip_prefix("unix:") {
            Some(path) if path.starts_with('/') => Ok(Self::Unix(PathBuf::from(path))),
            Some(_) => Err(error()),
            None => text.parse().map(Self::Tcp).map_err(|_| error()),
        }
    }
}

impl fmt::Display for MetricsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl<'de> serde::Deserialize<'de> for MetricsAddress {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_shown() {
        for text in ["127.0.0.1:19719", "[::1]:80", "0.0.0.0:0", "unix:/run/fpr/metrics.sock"] {
            assert_eq!(text.parse::<MetricsAddress>().unwrap().to_string(), text);
        }
        for text in ["", "19719", ":19719", "localhost:19719", "unix:", "unix:metrics.sock", "/run/fpr/metrics.sock"] {
            let error = text.parse::<MetricsAddress>().unwrap_err().to_string();
            assert!(error.contains(text) && error.contains("unix:/run/fpr/metrics.sock"), "{error}");
        }
    }
}
