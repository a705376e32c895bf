//! Drives a pager with a request trace whose prompts are given as chained block ids: equal ids mean equal tokens up
//! to and including the block.
//!
//! Each id stands for one token of a pager with `block_size` 1, so the real pager does all the work. A request's
//! chain is its prompt's full blocks, the blocks of its answer, and one private block that is never shared. The whole
//! chain is taken at admission and can be hit from then on: a simplification, since a server publishes what it has
//! computed. Requests are served first come, first served; one waits while there is no room, until enough of the
//! running ones have finished.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use crate::config::{Config, PolicyKind};
use crate::error::{Error, Result};
use crate::evict::Departure;
use crate::ids::{Handle, Token};
use crate::pager::Pager;

/// A trace in columns, one entry a request but for `ids`.
#[derive(Debug)]
pub struct Trace {
    /// Chains of all requests, one after the other, without private blocks.
    pub ids: Vec<Token>,
    /// Where each chain starts in `ids`, and where the last ends.
    pub offsets: Vec<usize>,
    /// Full blocks of each prompt.
    pub prompt_blocks: Vec<u32>,
    /// Arrival and length of service, in seconds; none: each request ends at once.
    pub times: Option<Vec<(f64, f64)>>,
}

impl Trace {
    /// Checks that the columns fit together.
    ///
    /// # Errors
    /// `Value`, naming the column and the request.
    pub fn validate(&self) -> Result<()> {
        let requests = self.prompt_blocks.len();
        let fail = |message: String| Err(Error::Value(message));
        if self.offsets.len() != requests + 1 || self.times.as_ref().is_some_and(|times| times.len() != requests) {
            return fail(format!("{requests} requests need {} offsets and as many times as requests", requests + 1));
        }
        if self.offsets.first() != Some(&0) || self.offsets.last() != Some(&self.ids.len()) {
            return fail("offsets must start at 0 and end at the number of ids".to_owned());
        }
        for (request, window) in self.offsets.windows(2).enumerate() {
            if window[1] < window[0] || window[1] - window[0] < self.prompt_blocks[request] as usize {
                return fail(format!("request {request}: its chain is shorter than its prompt"));
            }
        }
        if let Some(times) = &self.times
            && let Some(request) = times
                .iter()
                .position(|&(arrival, service)| !(arrival.is_finite() && service.is_finite() && service >= 0.0))
        {
            return fail(format!("request {request}: arrival and service must be finite, and service not negative"));
        }
        super::pager::check_tokens(&self.ids, 0)
    }
}

/// What a replay counts.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Totals {
    /// Requests served.
    pub requests: u64,
    /// Full blocks of their prompts.
    pub prompt_blocks: u64,
    /// Those found cached.
    pub hit_blocks: u64,
    /// Blocks evicted.
    pub evicted_blocks: u64,
    /// Blocks cached at the end.
    pub cached_blocks: u64,
    /// Most blocks held at one time.
    pub active_blocks_max: u64,
}

/// When a request ends; ordered by time, then by request.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Finish {
    time: f64,
    request: usize,
    handle: Handle,
}

impl Eq for Finish {}

impl Ord for Finish {
    fn cmp(&self, other: &Self) -> Ordering {
        self.time.total_cmp(&other.time).then(self.request.cmp(&other.request))
    }
}

impl PartialOrd for Finish {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// A replay in progress.
#[derive(Debug)]
pub struct Replay {
    trace: Trace,
    pager: Pager,
    totals: Totals,
    next: usize,
    now: f64,
    running: BinaryHeap<Reverse<Finish>>,
    chain: Vec<Token>,
}

impl Replay {
    /// A replay that has served nothing yet.
    ///
    /// # Errors
    /// `Value` or `Token` for a trace that does not fit together, `Config` for the pool.
    pub fn new(trace: Trace, num_blocks: usize, policy: PolicyKind) -> Result<Self> {
        trace.validate()?;
        let config = Config {
            num_host_blocks: 0,
            num_ghost_blocks: 0,
            num_blocks,
            block_size: 1,
            policy,
            watermark: 0.0,
            identity: Vec::new(),
            seed: 0,
            null_block: false,
            prefix_cache: true,
        };
        let pager = Pager::new(config)?;
        Ok(Self {
            trace,
            pager,
            totals: Totals::default(),
            next: 0,
            now: 0.0,
            running: BinaryHeap::new(),
            chain: Vec::new(),
        })
    }

    /// Serves up to `requests` more; answers how many have been served in all.
    ///
    /// # Errors
    /// `NeverFits` for a request that is larger than the pool.
    pub fn advance(&mut self, requests: usize) -> Result<usize> {
        let end = self.trace.prompt_blocks.len().min(self.next.saturating_add(requests));
        while self.next < end {
            self.serve(self.next)?;
            self.next += 1;
        }
        if self.next == self.trace.prompt_blocks.len() {
            self.finish_until(f64::INFINITY);
        }
        Ok(self.next)
    }

    /// What has been counted so far.
    #[must_use]
    pub fn totals(&self) -> Totals {
        let stats = self.pager.stats();
        Totals {
            evicted_blocks: stats.counters.evicted_blocks,
            cached_blocks: stats.cached_blocks as u64,
            ..self.totals
        }
    }

    fn serve(&mut self, request: usize) -> Result<()> {
        self.chain.clear();
        self.chain.extend_from_slice(&self.trace.ids[self.trace.offsets[request]..self.trace.offsets[request + 1]]);
        // The private block. Its value does not matter: it is never committed.
        self.chain.push(0);
        let times = self.trace.times.as_ref().map(|times| times[request]);
        if let Some((arrival, _)) = times {
            self.now = self.now.max(arrival);
            self.finish_until(self.now);
        }
        let handle = loop {
            match self.pager.admit(&self.chain, b"\0", false) {
                Err(Error::OutOfBlocks { .. }) if !self.running.is_empty() => self.finish_next(),
                result => break result?,
            }
        };
        self.pager.commit(handle, Some(self.chain.len() - 1))?;
        let prompt_blocks = self.trace.prompt_blocks[request];
        let num_cached = self.pager.running(handle, "replay")?.num_cached as usize;
        self.totals.requests += 1;
        self.totals.prompt_blocks += u64::from(prompt_blocks);
        self.totals.hit_blocks += num_cached.min(prompt_blocks as usize) as u64;
        self.totals.active_blocks_max = self.totals.active_blocks_max.max(self.pager.stats().active_blocks as u64);
        match times {
            Some((_, service)) => self.running.push(Reverse(Finish { time: self.now + service, request, handle })),
            None => self.pager.release(handle, Departure::Finished),
        }
        Ok(())
    }

    fn finish_until(&mut self, time: f64) {
        while self.running.peek().is_some_and(|Reverse(finish)| finish.time <= time) {
            self.finish_next();
        }
    }

    fn finish_next(&mut self) {
        if let Some(Reverse(finish)) = self.running.pop() {
            self.now = self.now.max(finish.time);
            self.pager.release(finish.handle, Departure::Finished);
        }
    }
}
