//! A small HTTP/1.1 client that sees what a browser cannot tell apart: answered, cut off in the middle, never answered.
//!
//! Times are taken before the connection is made. The kernel completes a connection while no worker accepts it, so the
//! wait in the server's backlog is part of every latency measured here.
use crate::clock::now_ns;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// How often a blocked read looks whether it should give up.
const LOOK_EVERY: Duration = Duration::from_millis(50);
const MAX_HEADERS: usize = 48;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reply {
    pub status: u16,
    pub retry_after_s: Option<u32>,
    /// The connection can carry another request.
    pub keep_alive: bool,
    /// Bytes of the body, decoded.
    pub length: usize,
    /// The end of the body is marked (a length or a last chunk): a reader can tell that all of it has come.
    pub framed: bool,
}

#[derive(Debug)]
pub enum Fault {
    /// Closed or reset before a byte of the answer: on a reused connection, the server's right at any time.
    Unanswered(String),
    /// Closed or reset in the middle of the answer.
    Truncated { status: Option<u16>, length: usize },
    /// Not HTTP.
    Malformed(String),
    /// The caller's `give_up` said so.
    GaveUp,
    /// No connection.
    Connect(io::Error),
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Fault::Unanswered(how) => write!(f, "{how} before a byte of the answer"),
            Fault::Truncated { status: Some(s), length } => write!(f, "status {s}, cut off after {length} bytes"),
            Fault::Truncated { status: None, .. } => write!(f, "cut off within the header"),
            Fault::Malformed(what) => write!(f, "not HTTP: {what}"),
            Fault::GaveUp => write!(f, "no end of the answer when the client gave up"),
            Fault::Connect(e) => write!(f, "no connection: {e}"),
        }
    }
}

/// The text of a GET request of HTTP/1.0, whose answer ends with the connection.
pub fn get_old(path: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n").into_bytes()
}

/// The text of a GET request.
pub fn get(path: &str, headers: &[(&str, &str)], keep_alive: bool) -> Vec<u8> {
    let mut text = format!("GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n");
    for (name, value) in headers {
        text += &format!("{name}: {value}\r\n");
    }
    text += if keep_alive { "\r\n" } else { "Connection: close\r\n\r\n" };
    text.into_bytes()
}

enum Body {
    None,
    Length(usize),
    Chunked,
    /// To the end of the connection.
    Rest,
}

pub struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
    from: usize,
    to: usize,
    /// The last answer's header, if it is wanted.
    header: Option<Vec<u8>>,
}

impl Connection {
    pub fn open(address: SocketAddr) -> Result<Connection, Fault> {
        let stream = TcpStream::connect_timeout(&address, Duration::from_secs(10)).map_err(Fault::Connect)?;
        let set = || -> io::Result<()> {
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(LOOK_EVERY))?;
            stream.set_write_timeout(Some(Duration::from_secs(10)))
        };
        set().map_err(Fault::Connect)?;
        Ok(Connection { stream, buffer: vec![0; 16 * 1024], from: 0, to: 0, header: None })
    }

    /// Sends `request` and reads its answer; the body goes to `body` if given, else it is counted only.
    pub fn exchange(
        &mut self,
        request: &[u8],
        body: Option<&mut Vec<u8>>,
        give_up: &dyn Fn() -> bool,
    ) -> Result<Reply, Fault> {
        self.send(request)?;
        self.receive(body, give_up)
    }

    pub fn send(&mut self, request: &[u8]) -> Result<(), Fault> {
        (self.from, self.to) = (0, 0);
        self.stream.write_all(request).map_err(|e| Fault::Unanswered(e.to_string()))
    }

    pub fn receive(&mut self, mut body: Option<&mut Vec<u8>>, give_up: &dyn Fn() -> bool) -> Result<Reply, Fault> {
        let mut reply = Reply::default();
        let framing = self.head(&mut reply, give_up)?;
        let cut = |status: u16, length: usize| Fault::Truncated { status: Some(status), length };
        let mut take = |bytes: &[u8], reply: &mut Reply| {
            reply.length += bytes.len();
            if let Some(body) = body.as_deref_mut() {
                body.extend_from_slice(bytes);
            }
        };
        reply.framed = !matches!(framing, Body::Rest);
        match framing {
            Body::None => {}
            Body::Length(length) => {
                while reply.length < length {
                    if self.from == self.to && self.fill(give_up)?.is_some() {
                        return Err(cut(reply.status, reply.length));
                    }
                    let n = (self.to - self.from).min(length - reply.length);
                    take(&self.buffer[self.from..self.from + n], &mut reply);
                    self.from += n;
                }
            }
            Body::Chunked => loop {
                // A chunk's size line, its data, its line end; the last one is empty and ends with the trailer.
                let size = loop {
                    match httparse::parse_chunk_size(&self.buffer[self.from..self.to]) {
                        Ok(httparse::Status::Complete((used, size))) => {
                            self.from += used;
                            break size as usize;
                        }
                        Ok(httparse::Status::Partial) => {
                            if self.fill(give_up)?.is_some() {
                                return Err(cut(reply.status, reply.length));
                            }
                        }
                        Err(_) => return Err(Fault::Malformed("a chunk's size".into())),
                    }
                };
                let mut left = size;
                while left > 0 {
                    if self.from == self.to && self.fill(give_up)?.is_some() {
                        return Err(cut(reply.status, reply.length));
                    }
                    let n = (self.to - self.from).min(left);
                    take(&self.buffer[self.from..self.from + n], &mut reply);
                    self.from += n;
                    left -= n;
                }
                // The trailer, which nobody sends here, ends like a chunk: with an empty line.
                loop {
                    let line = self.buffer[self.from..self.to].windows(2).position(|w| w == b"\r\n");
                    match line {
                        Some(at) => {
                            self.from += at + 2;
                            if at == 0 {
                                break;
                            }
                        }
                        None => {
                            if self.fill(give_up)?.is_some() {
                                return Err(cut(reply.status, reply.length));
                            }
                        }
                    }
                }
                if size == 0 {
                    break;
                }
            },
            Body::Rest => {
                reply.keep_alive = false;
                loop {
                    take(&self.buffer[self.from..self.to], &mut reply);
                    self.from = self.to;
                    match self.fill(give_up)? {
                        None => {}
                        // A clean end; a reset says that something is missing.
                        Some(End::Closed) => break,
                        Some(End::Reset(_)) => return Err(cut(reply.status, reply.length)),
                    }
                }
            }
        }
        Ok(reply)
    }

    fn head(&mut self, reply: &mut Reply, give_up: &dyn Fn() -> bool) -> Result<Body, Fault> {
        loop {
            let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
            let mut head = httparse::Response::new(&mut headers);
            let used = match head.parse(&self.buffer[self.from..self.to]) {
                Ok(httparse::Status::Complete(used)) => used,
                Ok(httparse::Status::Partial) => {
                    let nothing = self.from == self.to;
                    match self.fill(give_up)? {
                        None => continue,
                        Some(end) if nothing => return Err(Fault::Unanswered(end.text())),
                        Some(_) => return Err(Fault::Truncated { status: None, length: 0 }),
                    }
                }
                Err(e) => return Err(Fault::Malformed(e.to_string())),
            };
            reply.status = head.code.unwrap_or(0);
            reply.keep_alive = head.version == Some(1);
            let mut framing = Body::Rest;
            for h in head.headers.iter() {
                let value = || std::str::from_utf8(h.value).unwrap_or("").trim();
                if h.name.eq_ignore_ascii_case("content-length") {
                    let length = value().parse().map_err(|_| Fault::Malformed("Content-Length".into()))?;
                    if !matches!(framing, Body::Chunked) {
                        framing = Body::Length(length);
                    }
                } else if h.name.eq_ignore_ascii_case("transfer-encoding") && value().eq_ignore_ascii_case("chunked") {
                    framing = Body::Chunked;
                } else if h.name.eq_ignore_ascii_case("connection") {
                    reply.keep_alive &= !value().eq_ignore_ascii_case("close");
                } else if h.name.eq_ignore_ascii_case("retry-after") {
                    reply.retry_after_s = value().parse().ok();
                }
            }
            if let Some(header) = &mut self.header {
                header.clear();
                header.extend_from_slice(&self.buffer[self.from..self.from + used]);
            }
            self.from += used;
            match reply.status {
                // 1xx: the answer proper follows.
                100..=199 => continue,
                204 | 304 => return Ok(Body::None),
                _ => return Ok(framing),
            }
        }
    }

    /// Reads more; `Some` says how the connection ended.
    fn fill(&mut self, give_up: &dyn Fn() -> bool) -> Result<Option<End>, Fault> {
        if self.from > 0 {
            self.buffer.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
        }
        if self.to == self.buffer.len() {
            self.buffer.resize(self.to * 2, 0);
        }
        loop {
            match self.stream.read(&mut self.buffer[self.to..]) {
                Ok(0) => return Ok(Some(End::Closed)),
                Ok(n) => {
                    self.to += n;
                    return Ok(None);
                }
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    if give_up() {
                        return Err(Fault::GaveUp);
                    }
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Ok(Some(End::Reset(e.to_string()))),
            }
        }
    }
}

enum End {
    Closed,
    Reset(String),
}

impl End {
    fn text(self) -> String {
        match self {
            End::Closed => "closed".into(),
            End::Reset(e) => e,
        }
    }
}

/// One request on a connection of its own, from before the connection was made to the end of the answer.
#[derive(Debug)]
pub struct Visit {
    pub started_ns: i64,
    pub ended_ns: i64,
    pub result: Result<Reply, Fault>,
    /// As it came, empty when none came.
    pub header: String,
    pub body: Vec<u8>,
}

impl Visit {
    pub fn status(&self) -> Option<u16> {
        match &self.result {
            Ok(reply) => Some(reply.status),
            Err(Fault::Truncated { status, .. }) => *status,
            Err(_) => None,
        }
    }

    /// A browser would show this as a whole page.
    pub fn looks_complete(&self) -> bool {
        self.result.is_ok()
    }

    pub fn text(&self) -> String {
        let took = (self.ended_ns - self.started_ns) as f64 / 1e6;
        match &self.result {
            Ok(r) => {
                let retry = r.retry_after_s.map_or(String::new(), |s| format!(", Retry-After {s}"));
                format!("{}{retry} after {took:.0} ms", r.status)
            }
            Err(e) => format!("{e} after {took:.0} ms"),
        }
    }
}

pub fn visit(address: SocketAddr, request: &[u8], give_up: &dyn Fn() -> bool) -> Visit {
    let started_ns = now_ns();
    let (mut header, mut body) = (String::new(), vec![]);
    let result = Connection::open(address).and_then(|mut c| {
        c.header = Some(vec![]);
        let result = c.exchange(request, Some(&mut body), give_up);
        header = String::from_utf8_lossy(&c.header.unwrap_or_default()).into_owned();
        result
    });
    Visit { started_ns, ended_ns: now_ns(), result, header, body }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// Serves `parts` of an answer, one write each, then closes the connection.
    fn against(parts: &'static [&'static [u8]]) -> Visit {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = std::thread::spawn(move || {
            let (mut s, _) = listener.accept().unwrap();
            s.set_nodelay(true).unwrap();
            // The request is read to its end first: closing with unread input would reset the connection.
            let mut request = vec![];
            while !request.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                assert_eq!(s.read(&mut byte).unwrap(), 1);
                request.push(byte[0]);
            }
            for part in parts {
                s.write_all(part).unwrap();
            }
        });
        let seen = visit(address, &get("/", &[], true), &|| false);
        server.join().unwrap();
        seen
    }

    #[test]
    fn a_body_with_length_is_read_to_its_end() {
        let v = against(&[b"HTTP/1.1 200 OK\r\nContent-Le", b"ngth: 5\r\n\r\nab", b"cde"]);
        assert_eq!((v.status(), v.body.as_slice(), v.looks_complete()), (Some(200), &b"abcde"[..], true));
    }

    #[test]
    fn chunks_are_decoded_wherever_they_are_cut() {
        const HEAD: &[u8] = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
        let v = against(&[HEAD, b"3\r", b"\nabc\r", b"\n2\r\nde\r\n0\r\n", b"\r\n"]);
        assert_eq!((v.status(), v.body.as_slice(), v.looks_complete()), (Some(200), &b"abcde"[..], true));
    }

    #[test]
    fn a_page_without_its_last_chunk_does_not_look_complete() {
        let v = against(&[b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"]);
        assert!(matches!(v.result, Err(Fault::Truncated { status: Some(200), length: 3 })), "{v:?}");
        let v = against(&[b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab"]);
        assert!(matches!(v.result, Err(Fault::Truncated { status: Some(200), length: 2 })), "{v:?}");
    }

    #[test]
    fn unanswered_is_not_truncated() {
        assert!(matches!(against(&[]).result, Err(Fault::Unanswered(_))));
        assert!(matches!(against(&[b"HTTP/1.1 20"]).result, Err(Fault::Truncated { status: None, .. })));
    }

    #[test]
    fn retry_after_and_the_end_of_the_connection_are_seen() {
        let v = against(&[
            b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 7\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
        ]);
        let r = v.result.unwrap();
        assert_eq!((r.status, r.retry_after_s, r.keep_alive, r.length, r.framed), (503, Some(7), false, 0, true));
        let r = against(&[b"HTTP/1.0 200 OK\r\n\r\nabc"]).result.unwrap();
        assert_eq!((r.length, r.framed, r.keep_alive), (3, false, false));
    }
}
