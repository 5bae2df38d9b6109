//! The HTTP listener: GET and HEAD of `/metrics`, nothing else.

use super::{Format, MetricsAddress, text};
use crate::control::DaemonStatus;
use crate::device::{ListenError, SocketFile, bind_listener};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Mutex, Semaphore};

/// Clients at a time; more wait in the kernel's queue.
const MAX_CLIENTS: usize = 8;
/// Time for a request to arrive.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for a client's whole visit. Prometheus gives up after 10 s unless told otherwise.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(15);
/// Longest head of a request in bytes, the least hyper takes.
const MAX_REQUEST_BYTES: usize = 8192;
/// Headers in a request at most.
const MAX_HEADERS: usize = 64;
/// Scrapes so soon after each other get the same text: whoever may scrape cannot make it cost more by doing it often.
const SAME_TEXT: Duration = Duration::from_secs(1);

/// Why `/metrics` cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The Unix socket.
    #[error("metrics socket")]
    Unix(#[from] ListenError),
    /// The TCP address.
    #[error("cannot serve metrics on {address}: is the port in use, and the address one of this host?")]
    Tcp {
        /// It.
        address: SocketAddr,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

/// A bound address; its socket file goes with it.
pub struct Listener(Kind);

enum Kind {
    Tcp(tokio::net::TcpListener),
    Unix(tokio::net::UnixListener, #[expect(dead_code, reason = "removes the socket's file with itself")] SocketFile),
}

impl Listener {
    /// Binds the address; within a runtime.
    ///
    /// # Errors
    /// See [`BindError`]; nothing is left behind.
    pub fn bind(address: &MetricsAddress) -> Result<Self, BindError> {
        match address {
            MetricsAddress::Tcp(address) => {
                let bind = || {
                    let listener = std::net::TcpListener::bind(address)?;
                    listener.set_nonblocking(true)?;
                    tokio::net::TcpListener::from_std(listener)
                };
                bind()
                    .map(|listener| Self(Kind::Tcp(listener)))
                    .map_err(|source| BindError::Tcp { address: *address, source })
            }
            MetricsAddress::Unix(path) => {
                let (listener, file) = bind_listener(path)?;
                let os = |source| ListenError::Os { action: "listen on", path: path.clone(), source };
                listener.set_nonblocking(true).map_err(os)?;
                Ok(Self(Kind::Unix(tokio::net::UnixListener::from_std(listener).map_err(os)?, file)))
            }
        }
    }

    /// Where it listens; of a port 0, the one the kernel chose.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn address(&self) -> io::Result<MetricsAddress> {
        match &self.0 {
            Kind::Tcp(listener) => listener.local_addr().map(MetricsAddress::Tcp),
            Kind::Unix(listener, _) => {
                let address = listener.local_addr()?;
                let path = address.as_pathname().ok_or(io::ErrorKind::AddrNotAvailable)?;
                Ok(MetricsAddress::Unix(path.to_owned()))
            }
        }
    }

    async fn accept(&self) -> io::Result<Box<dyn Connection>> {
        match &self.0 {
            Kind::Tcp(listener) => Ok(Box::new(listener.accept().await?.0)),
            Kind::Unix(listener, _) => Ok(Box::new(listener.accept().await?.0)),
        }
    }
}

trait Connection: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Connection for T {}

/// Answers scrapers until the task is aborted; `status` is asked for the figures.
pub async fn serve<S, F>(listener: Listener, status: S)
where
    S: Fn() -> F + Send + Sync + 'static,
    F: Future<Output = DaemonStatus> + Send + 'static,
{
    let slots = Arc::new(Semaphore::new(MAX_CLIENTS));
    let scrapes = Arc::new(Scrapes { status, last: Mutex::default() });
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
        match listener.accept().await {
            Ok(connection) => {
                let scrapes = Arc::clone(&scrapes);
                tokio::spawn(async move {
                    let answer = service_fn(move |request| {
                        let scrapes = Arc::clone(&scrapes);
                        async move { Ok::<_, Infallible>(scrapes.answer(&request).await) }
                    });
                    let visit = http1::Builder::new()
                        .timer(TokioTimer::new())
                        .header_read_timeout(REQUEST_TIMEOUT)
                        .max_buf_size(MAX_REQUEST_BYTES)
                        .max_headers(MAX_HEADERS)
                        .keep_alive(false)
                        .serve_connection(TokioIo::new(connection), answer);
                    // Who is late, gone or talks no HTTP gets no answer; there is nobody to tell.
                    let _ = tokio::time::timeout(CLIENT_TIMEOUT, visit).await;
                    drop(slot);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept on the metrics socket");
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }
    }
}

/// What was answered last in each format, and when.
type Last = HashMap<Format, (Instant, Bytes)>;

struct Scrapes<S> {
    status: S,
    /// Held while a text is made, so that one is made at a time.
    last: Mutex<Last>,
}

impl<S, F> Scrapes<S>
where
    S: Fn() -> F,
    F: Future<Output = DaemonStatus>,
{
    async fn answer(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        if request.uri().path() != "/metrics" {
            return plain(StatusCode::NOT_FOUND, "the figures are at /metrics\n");
        }
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            let mut response = plain(StatusCode::METHOD_NOT_ALLOWED, "use GET or HEAD\n");
            response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
            return response;
        }
        let accept = request.headers().get(ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
        let format = Format::accepted(accept);
        match self.text(format).await {
            Some(body) => {
                let mut response = Response::new(Full::new(body));
                response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(format.content_type()));
                response
            }
            None => plain(StatusCode::INTERNAL_SERVER_ERROR, "the figures could not be written\n"),
        }
    }

    async fn text(&self, format: Format) -> Option<Bytes> {
        let mut last = self.last.lock().await;
        if let Some((at, body)) = last.get(&format)
            && at.elapsed() < SAME_TEXT
        {
            return Some(body.clone());
        }
        let status = (self.status)().await;
        // Some milliseconds for hundreds of VMs: not on a thread that VMs' tasks run on.
        let write = move || text(serde_json::to_value(status).ok()?, format).ok();
        let body = Bytes::from(tokio::task::spawn_blocking(write).await.ok()??);
        last.insert(format, (Instant::now(), body.clone()));
        Some(body)
    }
}

fn plain(status: StatusCode, text: &'static str) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(text));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    response
}
