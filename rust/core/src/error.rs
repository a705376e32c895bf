//! What can go wrong, with the numbers that a caller needs to act on it.

use std::collections::TryReserveError;
use std::fmt;

use crate::ids::{Tier, Token};

/// The result of a call on the core.
pub type Result<T> = std::result::Result<T, Error>;

/// A refused call. Nothing has changed (I7).
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Error {
    /// The pool cannot give the blocks now.
    OutOfBlocks {
        /// Blocks to take, hits excluded, the watermark's reserve included where that refused.
        needed: usize,
        /// Free blocks.
        free: usize,
        /// Cached blocks that could be evicted for this call.
        evictable: usize,
        /// Blocks of the pool.
        total: usize,
        /// Rows of a batch that did not fit into what the rows before them left.
        rows: Box<[u32]>,
        /// Of those needed, the watermark's reserve, if that refused; else 0.
        reserve: usize,
        /// Where they are missing.
        tier: Tier,
    },
    /// The request is larger than the pool: waiting will not help.
    NeverFits {
        /// Blocks of the whole request.
        needed: usize,
        /// Blocks that sequences can ever hold.
        usable: usize,
        /// Where it is too large.
        tier: Tier,
    },
    /// The handle's sequence does not allow this call.
    Stale {
        /// The sequence's number.
        sequence: u64,
        /// What became of it.
        state: &'static str,
        /// The call.
        call: &'static str,
    },
    /// A step, or a sequence that an open step names, was used out of order.
    Step(String),
    /// A plan, or a call that makes one, was used out of order.
    Transfer(String),
    /// A token outside 0 to 2^31-1.
    Token {
        /// Its position in the argument.
        position: usize,
        /// Its value as given, of which the core sees 32 bits.
        value: Token,
    },
    /// A prompt without tokens.
    EmptyPrompt,
    /// A bad setting.
    Config(String),
    /// A bad argument.
    Value(String),
    /// The machine's memory is used up.
    Memory,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfBlocks { needed, free, evictable, total, tier, .. } => {
                write!(
                    f,
                    "needed {needed} blocks of the {}; {free} free and {evictable} evictable of {total}",
                    tier.name()
                )
            }
            Self::NeverFits { needed, usable, tier } => {
                write!(f, "needs {needed} blocks of the {}, which has {usable}", tier.name())
            }
            Self::Stale { sequence, state, call } => write!(f, "{call}: sequence {sequence} is {state}"),
            Self::Token { position, value } => {
                write!(f, "token {value} at position {position} is outside 0 to 2147483647")
            }
            Self::EmptyPrompt => f.write_str("an empty prompt"),
            Self::Config(message) | Self::Value(message) | Self::Step(message) | Self::Transfer(message) => {
                f.write_str(message)
            }
            Self::Memory => f.write_str("the machine has no memory left"),
        }
    }
}

impl std::error::Error for Error {}

impl From<TryReserveError> for Error {
    fn from(_: TryReserveError) -> Self {
        Self::Memory
    }
}
