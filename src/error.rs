//! Errors: one code for C, one text for people.

use std::fmt;

/// Error codes of the C API; numbers are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Code {
    Invalid = -1,
    NotInit = -2,
    Already = -3,
    Config = -4,
    Io = -5,
    Region = -6,
    Full = -7,
    Stale = -8,
    NotLeader = -9,
    Forked = -10,
    Panic = -11,
    Unsupported = -12,
}

impl Code {
    pub const ALL: [Code; 12] = [
        Code::Invalid,
        Code::NotInit,
        Code::Already,
        Code::Config,
        Code::Io,
        Code::Region,
        Code::Full,
        Code::Stale,
        Code::NotLeader,
        Code::Forked,
        Code::Panic,
        Code::Unsupported,
    ];

    /// What the code means, NUL-terminated for `atropos_strerror`.
    pub fn meaning(self) -> &'static core::ffi::CStr {
        match self {
            Code::Invalid => c"invalid argument",
            Code::NotInit => c"the library is not initialised in this process: call atropos_init first",
            Code::Already => c"already done: the library or the thread is running",
            Code::Config => c"bad configuration: atropos_last_error names line and key",
            Code::Io => c"a system call failed: atropos_last_error says which",
            Code::Region => c"the region file was refused: atropos_last_error says why",
            Code::Full => c"a table of the region is full",
            Code::Stale => c"the handle is stale or was never given out",
            Code::NotLeader => c"another process leads the controller; keep ticking, this one stands by",
            Code::Forked => c"forked child: call atropos_after_fork first",
            Code::Panic => c"a bug in libatropos was caught at the boundary; the host is unharmed",
            Code::Unsupported => c"not supported on this system",
        }
    }
}

/// An error with its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    pub code: Code,
    pub text: String,
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub fn new(code: Code, text: impl Into<String>) -> Self {
        Error { code, text: text.into() }
    }

    /// The last OS error of a call on `what`.
    pub fn os(call: &str, what: impl fmt::Display) -> Self {
        Error::new(Code::Io, format!("{call} {what}: {}", std::io::Error::last_os_error()))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Error {}
