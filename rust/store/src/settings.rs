//! What a store is asked to be, and the limits of that.

use std::path::PathBuf;

use crate::error::{Error, Result};
use crate::files::{IDENTITY_BYTES_MAX, charged};
use crate::format::{ENTRY_BYTES, Geometry, KEY_BYTES, KEYS_HEADER_BYTES};

/// Bytes of a segment, unless the store is so small or large that others suit it better.
const SEGMENT_BYTES: u64 = 64 << 20;
/// Records of a segment, at least.
pub const SLOTS_MIN: u64 = 8;
/// Segments of a store, at most: each holds a file open.
pub const SEGMENTS_MAX: usize = 512;
/// Most bytes of a payload, and of a meta.
pub const ROW_BYTES_MAX: usize = 1 << 30;
const META_BYTES_MAX: usize = 1 << 20;

/// When data is made to survive a loss of power. What `put_many` has answered survives the end of the process in any
/// case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SyncPolicy {
    /// When a segment is full, and at `close`.
    #[default]
    Segment,
    /// Before `put_many` answers.
    Always,
    /// When the system likes.
    Never,
}

impl SyncPolicy {
    /// The policy of a name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "segment" => Some(Self::Segment),
            "always" => Some(Self::Always),
            "never" => Some(Self::Never),
            _ => None,
        }
    }
}

/// What to open.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Where; it is made if it is not there.
    pub directory: PathBuf,
    /// Bytes of a payload.
    pub row_bytes: usize,
    /// Bytes of a meta; the first 32 are the parent's key.
    pub meta_bytes: usize,
    /// Bytes that all files of the store may have together, each in whole pages of 4,096.
    pub max_bytes: u64,
    /// Whose blocks these are: a store of another identity is refused.
    pub identity: Vec<u8>,
    /// When data is synced.
    pub sync: SyncPolicy,
    /// Bytes of a segment; None lets the limit choose.
    pub segment_bytes: Option<u64>,
}

impl Settings {
    /// Are the sizes within their limits?
    ///
    /// # Errors
    /// `Config`, naming the limit.
    pub fn check(&self) -> Result<()> {
        let outside = |name: &str, value: usize, low: usize, high: usize| {
            Err(Error::Config(format!("{name} is {value}; it must be {low} to {high}")))
        };
        if !(1..=ROW_BYTES_MAX).contains(&self.row_bytes) {
            return outside("row_bytes", self.row_bytes, 1, ROW_BYTES_MAX);
        }
        if !(KEY_BYTES..=META_BYTES_MAX).contains(&self.meta_bytes) {
            return outside("meta_bytes", self.meta_bytes, KEY_BYTES, META_BYTES_MAX);
        }
        if self.identity.len() > IDENTITY_BYTES_MAX {
            return Err(Error::Config(format!(
                "identity has {} bytes; the limit is {IDENTITY_BYTES_MAX}",
                self.identity.len()
            )));
        }
        Ok(())
    }

    /// How many slots a new segment gets, where the fixed files take so many bytes of the limit.
    ///
    /// # Errors
    /// `Config` if the limit has no room for two segments, or for too many.
    pub fn slots(&self, geometry: Geometry, fixed: u64) -> Result<u32> {
        // Large stores get large segments, so that no store needs many open files; small ones a sixteenth of their
        // limit, so that little is lost with a segment.
        let suited = (self.max_bytes / 16).min(SEGMENT_BYTES).max(self.max_bytes / (SEGMENTS_MAX as u64 / 2));
        let segment_bytes = self.segment_bytes.unwrap_or(suited);
        let slots = (segment_bytes / geometry.record_bytes() as u64).clamp(SLOTS_MIN, u64::from(u32::MAX) - 1) as u32;
        let charge = segment_charge(geometry, slots as usize);
        let least = fixed + 2 * charge;
        if self.max_bytes < least {
            return Err(Error::Config(format!(
                "max_bytes is {}; with segments of {slots} records of {} bytes it must be {least} or more, for two \
                 of them",
                self.max_bytes,
                geometry.record_bytes()
            )));
        }
        if self.max_bytes / charge > SEGMENTS_MAX as u64 {
            return Err(Error::Config(format!(
                "segment_bytes is {segment_bytes}; a store of {} bytes would have more than {SEGMENTS_MAX} such segments: \
                 take {} or more",
                self.max_bytes,
                self.max_bytes / SEGMENTS_MAX as u64 + 1
            )));
        }
        Ok(slots)
    }
}

/// Bytes of the limit that a segment with so many slots filled takes, its keys included.
pub fn segment_charge(geometry: Geometry, slots: usize) -> u64 {
    charged(geometry.offset(slots)) + charged((KEYS_HEADER_BYTES + slots * ENTRY_BYTES) as u64)
}
