//! Counters over the life of a pager, and the gauges beside them.

/// Counted since construction.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Counters {
    /// Successful releases: the clock.
    pub clock_ticks: u64,
    /// Successful admits.
    pub admitted_sequences: u64,
    /// Tokens of their prompts.
    pub queried_tokens: u64,
    /// Tokens of them that were cached.
    pub hit_tokens: u64,
    /// Blocks evicted.
    pub evicted_blocks: u64,
    /// Sum over evicted blocks: ticks since the last holder left.
    pub evicted_idle_ticks: u64,
    /// Sum over evicted blocks: admits that hit it since it was indexed.
    pub evicted_hits: u64,
    /// Copies handed out by `take_copies`.
    pub copies: u64,
    /// Calls of `preempt`.
    pub preemptions: u64,
    /// Committed tokens lost to preemption, less those found again at resume.
    pub recomputed_tokens: u64,
    /// Handles dropped while live.
    pub dropped_handles: u64,
    /// Calls refused for want of blocks.
    pub refused_calls: u64,
    /// Releases of released handles.
    pub noop_calls: u64,
    /// Host blocks that offloads brought into the host's index.
    pub offloaded_blocks: u64,
    /// Blocks that came back from the host for admissions.
    pub fetched_blocks: u64,
    /// Sequences swapped out.
    pub swap_outs: u64,
    /// Sequences swapped in.
    pub swap_ins: u64,
    /// Host blocks that saves brought to a store.
    pub saved_blocks: u64,
    /// Host blocks that loads brought into the host's index.
    pub loaded_blocks: u64,
    /// Reports of plans that had ended.
    pub late_reports: u64,
    /// Tokens that commits said to be written.
    pub computed_tokens: u64,
    /// Releases as finished.
    pub finished_sequences: u64,
    /// Committed tokens of sequences that were swapped out.
    pub swapped_tokens: u64,
    /// Evicted blocks that were asked for again while they were remembered.
    pub refaulted_blocks: u64,
    /// Sum over them: blocks evicted since.
    pub refault_distance: u64,
}

impl Counters {
    /// The counters that a drawing shows, by name: all but the clock, which has a line of its own, and the two that
    /// refused calls may change.
    #[must_use]
    pub const fn named(&self) -> [(&'static str, u64); 10] {
        [
            ("admitted_sequences", self.admitted_sequences),
            ("queried_tokens", self.queried_tokens),
            ("hit_tokens", self.hit_tokens),
            ("evicted_blocks", self.evicted_blocks),
            ("evicted_idle_ticks", self.evicted_idle_ticks),
            ("evicted_hits", self.evicted_hits),
            ("copies", self.copies),
            ("preemptions", self.preemptions),
            ("recomputed_tokens", self.recomputed_tokens),
            ("dropped_handles", self.dropped_handles),
        ]
    }
}

/// The host tier at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct HostStats {
    /// Blocks of the tier.
    pub total_blocks: usize,
    /// Blocks without content.
    pub free_blocks: usize,
    /// Blocks without holder, still indexed.
    pub cached_blocks: usize,
    /// Blocks with a holder.
    pub active_blocks: usize,
    /// Blocks that plans fill.
    pub writing_blocks: usize,
    /// Blocks that abandoned plans may still fill.
    pub quarantined_blocks: usize,
    /// Blocks evicted since construction.
    pub evicted_blocks: u64,
}

/// A pager's numbers at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Stats {
    /// Blocks of the pool.
    pub total_blocks: usize,
    /// Blocks without content.
    pub free_blocks: usize,
    /// Blocks without holder, still indexed.
    pub cached_blocks: usize,
    /// Blocks with a holder.
    pub active_blocks: usize,
    /// The null block.
    pub reserved_blocks: usize,
    /// Blocks that eviction could free.
    pub evictable_blocks: usize,
    /// Blocks that plans fill.
    pub writing_blocks: usize,
    /// Blocks that abandoned plans may still fill.
    pub quarantined_blocks: usize,
    /// The host's blocks, in the same states.
    pub host: HostStats,
    /// Sequences that hold blocks.
    pub running_sequences: usize,
    /// Sequences that wait for resume.
    pub preempted_sequences: usize,
    /// Sequences on the host.
    pub swapped_sequences: usize,
    /// What has been counted.
    pub counters: Counters,
}
