//! What a store refuses, and why.

use std::fmt;
use std::io;
use std::path::Path;

/// Why a call was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// A setting is outside its limits, or does not fit what is in the directory.
    Config(String),
    /// The operating system refused: the message names the file and the reason.
    Io(String),
    /// The store was closed.
    Closed(String),
    /// An earlier call hit a bug while it held a lock.
    Poisoned,
}

/// What a call answers.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// The system's error, with what was tried on which file.
    pub(crate) fn io(what: &str, path: &Path, error: &io::Error) -> Self {
        Self::Io(format!("cannot {what} {}: {error}", path.display()))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(message) | Self::Io(message) | Self::Closed(message) => f.write_str(message),
            Self::Poisoned => f.write_str("an earlier call failed inside the store: open it again"),
        }
    }
}

impl std::error::Error for Error {}
