//! Failures that users of other engines reported, told to this pager: what happened there must not happen here. One test or more a row of the
//! list; rows about transfers, events and the lock live where those do.

mod capacity;
mod eviction;
#[path = "../support/mod.rs"]
mod support;
mod wrong_bytes;

use kvpager_core::dump::dump;
use kvpager_core::ids::{Handle, Token};
use kvpager_core::{Error, Pager};
use support::{A, assert_sound};

fn prompt(first: Token, len: usize) -> Vec<Token> {
    (0..len as Token).map(|at| first * 1000 + at).collect()
}

fn admit(pager: &mut Pager, tokens: &[Token]) -> Handle {
    pager.admit(tokens, A, false).unwrap()
}

/// The call is refused with this error and leaves everything as it was (I7).
#[track_caller]
fn assert_refused<R: std::fmt::Debug>(
    pager: &mut Pager,
    error: &Error,
    call: impl FnOnce(&mut Pager) -> Result<R, Error>,
) {
    let before = dump(pager, true);
    assert_eq!(&call(pager).unwrap_err(), error);
    assert_eq!(dump(pager, true), before);
    assert_sound(pager);
}

type Call = fn(&mut Pager, Handle) -> Result<(), Error>;

fn stale(handle: Handle, state: &'static str, call: &'static str) -> Error {
    Error::Stale { sequence: handle.serial, state, call }
}
