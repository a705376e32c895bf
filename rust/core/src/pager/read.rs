//! What callers read: none of these calls changes anything.

use super::Pager;
use crate::error::{Error, Result};
use crate::ids::{Handle, Token};
use crate::sequence::{Sequence, State};
use crate::stats::{HostStats, Stats};
use crate::transfers::Tier;

impl Pager {
    /// The sequence behind a handle, running or preempted.
    ///
    /// # Errors
    /// `Stale` once it is released.
    pub fn sequence(&self, handle: Handle, call: &'static str) -> Result<&Sequence> {
        self.sequences.get(handle).ok_or(Error::Stale { sequence: handle.serial, state: "released", call })
    }

    /// The sequence behind a handle, which must be running.
    ///
    /// # Errors
    /// `Stale` if it is not.
    pub fn running(&self, handle: Handle, call: &'static str) -> Result<&Sequence> {
        let sequence = self.sequence(handle, call)?;
        match sequence.state {
            State::Running => Ok(sequence),
            state => Err(Error::Stale { sequence: handle.serial, state: state.name(), call }),
        }
    }

    /// The sequence behind a handle, which must hold blocks of the device.
    ///
    /// # Errors
    /// `Stale` if it does not.
    pub fn on_device(&self, handle: Handle, call: &'static str) -> Result<&Sequence> {
        let sequence = self.sequence(handle, call)?;
        if sequence.state.is_on_device() {
            return Ok(sequence);
        }
        Err(Error::Stale { sequence: handle.serial, state: sequence.state.name(), call })
    }

    /// The encoded namespace of a sequence.
    #[must_use]
    pub fn namespace(&self, sequence: &Sequence) -> &[u8] {
        &self.index.root(sequence.root).name
    }

    /// Appends a sequence's tokens to `out`, which has room for them.
    pub fn copy_tokens(&self, sequence: &Sequence, out: &mut Vec<Token>) {
        self.index.push_path_tokens(sequence.end, sequence.path_blocks, out);
        for slice in sequence.tail.slices(self.config.block_size) {
            out.extend_from_slice(slice);
        }
    }

    /// Gauges and counters.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let total_blocks = self.config.num_blocks;
        let reserved_blocks = total_blocks - self.config.usable_blocks();
        let (free_blocks, cached_blocks) = (self.num_free_blocks(), self.num_evictable_blocks());
        let (writing_blocks, quarantined_blocks) =
            (self.plans.num_writing(Tier::Device), self.plans.num_quarantined(Tier::Device));
        Stats {
            total_blocks,
            free_blocks,
            cached_blocks,
            active_blocks: total_blocks
                - reserved_blocks
                - free_blocks
                - cached_blocks
                - writing_blocks
                - quarantined_blocks,
            reserved_blocks,
            evictable_blocks: cached_blocks,
            running_sequences: self.num_running,
            preempted_sequences: self.num_preempted,
            swapped_sequences: self.num_swapped,
            writing_blocks,
            quarantined_blocks,
            host: self.host_stats(),
            counters: self.counters,
        }
    }

    fn host_stats(&self) -> HostStats {
        let Some(host) = &self.host else { return HostStats::default() };
        let (total_blocks, free_blocks, cached_blocks) = (host.num_blocks(), host.num_free(), host.evict.evictable());
        let (writing_blocks, quarantined_blocks) =
            (self.plans.num_writing(Tier::Host), self.plans.num_quarantined(Tier::Host));
        HostStats {
            total_blocks,
            free_blocks,
            cached_blocks,
            active_blocks: total_blocks - free_blocks - cached_blocks - writing_blocks - quarantined_blocks,
            writing_blocks,
            quarantined_blocks,
            evicted_blocks: host.num_evicted,
        }
    }
}
