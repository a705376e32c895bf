//! A store of KV blocks in a directory: a log of records of one size, bounded by bytes for ever.
//!
//! A *record* is a key of 32 bytes, a *meta* (exact bytes that say what the block is; the first 32 are the parent's
//! key) and a *payload*. A record is read only by whoever names its key and its meta, byte by byte; a checksum covers
//! all three.
//!
//! ```text
//! kvpager.manifest        sizes of the records, the identity, the format's version
//! kvpager.lock            held by the one process that writes
//! kvpager-<n>.seg         segment n: records, one after the other
//! kvpager-<n>.keys        keys and parents of segment n, while nobody writes to it
//! ```
//!
//! - A record is written once, to the end of the last segment, and deleted at most once, by zeros over its head.
//! - Where there is no room for another segment, the one that was used longest ago is dropped first; of those that one
//!   call used, the newest: children rather than parents. A new segment takes its full size of the limit before its
//!   file is made, so that the limit holds at any moment. When segments were used is kept in memory only: after a
//!   restart the oldest goes first.
//! - In memory: 24 bytes a record and 11 to 32 of the table of keys.
//! - A segment whose keys are missing or damaged is looked through, record by record; what is torn is a miss.
//!
//! `format` says what is in the files to the byte; `docs/design/disk-store.md` why.

#![forbid(unsafe_code)]

mod error;
mod files;
mod format;
mod index;
mod inspect;
mod open;
mod read;
mod settings;
mod stats;
mod store;
mod table;

pub use error::{Error, Result};
pub use files::Manifest;
pub use format::{Geometry, KEY_BYTES};
pub use inspect::{Inspection, Keys, SegmentReport, inspect, look, verify};
pub use read::{Rows, RowsMut};
pub use settings::{Settings, SyncPolicy};
pub use stats::Stats;
pub use store::LogStore;
