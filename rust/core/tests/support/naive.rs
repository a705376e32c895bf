//! A second pager, block by block, clear and not fast: it predicts the core's ids, positions, queues and statistics.
//!
//! It follows `docs/design/rules.md`; numbers in comments are that page's. Its tree has one node a block, named by the block's id, its queues
//! are vectors, and everything is searched for.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvpager_core::evict::Departure;
use kvpager_core::ids::{BlockId, CONTENT_START, TOKEN_END, Token};
use kvpager_core::stats::{Counters, Stats};
use kvpager_core::transfers::Tier;
use kvpager_core::{Config, Error, PolicyKind, Result};

/// A block that is in the index, or was and is still held.
#[derive(Debug)]
pub struct Node {
    pub above: Option<BlockId>,
    pub namespace: Vec<u8>,
    pub tokens: Vec<Token>,
    /// By creation.
    pub children: Vec<BlockId>,
    pub is_indexed: bool,
    pub hits: u64,
    pub is_marked: bool,
    pub idle_since: u64,
}

/// A sequence that is not released.
#[derive(Clone, Debug)]
pub struct Sequence {
    pub tokens: Vec<Token>,
    pub namespace: Vec<u8>,
    pub is_pinned: bool,
    pub is_running: bool,
    pub table: Vec<BlockId>,
    pub path: Vec<BlockId>,
    pub num_cached: usize,
    pub num_committed: usize,
    pub publishes: bool,
    lost_tokens: usize,
    pub num_preemptions: u32,
    pub back: Option<(u64, u64)>,
}

impl Sequence {
    fn is_on_path(&self, position: usize) -> bool {
        self.path.get(position) == Some(&self.table[position])
    }

    fn loose_from(&self, position: usize) -> Vec<BlockId> {
        (position..self.table.len()).rev().filter(|&at| !self.is_on_path(at)).map(|at| self.table[at]).collect()
    }
}

#[derive(Debug)]
pub struct Naive {
    pub config: Config,
    /// The back is the top of the stack.
    pub free: VecDeque<BlockId>,
    /// A node with a holder is itself one holder of its parent (2.2).
    pub holds: Vec<u32>,
    pub nodes: Vec<Option<Node>>,
    /// Namespace -> its first blocks, by creation.
    pub roots: BTreeMap<Vec<u8>, Vec<BlockId>>,
    /// Coldest first. lru: one; slru: probation, protected.
    pub queues: Vec<Vec<BlockId>>,
    /// (source, target) in the order of asking.
    pub copies: Vec<(BlockId, BlockId)>,
    pub sequences: BTreeMap<u64, Sequence>,
    pub next_serial: u64,
    num_returns: u64,
    pub counters: Counters,
}

impl Naive {
    pub fn new(config: Config) -> Self {
        let first = u32::from(config.null_block);
        Self {
            free: (first..config.num_blocks as u32).rev().collect(),
            holds: vec![0; config.num_blocks],
            nodes: (0..config.num_blocks).map(|_| None).collect(),
            roots: BTreeMap::new(),
            queues: vec![Vec::new(); if config.policy == PolicyKind::Lru { 1 } else { 2 }],
            copies: Vec::new(),
            sequences: BTreeMap::new(),
            next_serial: 0,
            num_returns: 0,
            counters: Counters::default(),
            config,
        }
    }

    pub fn stats(&self) -> Stats {
        let reserved_blocks = usize::from(self.config.null_block);
        let (free_blocks, cached_blocks) = (self.free.len(), self.num_cached());
        let running_sequences = self.sequences.values().filter(|sequence| sequence.is_running).count();
        Stats {
            total_blocks: self.config.num_blocks,
            free_blocks,
            cached_blocks,
            active_blocks: self.config.num_blocks - reserved_blocks - free_blocks - cached_blocks,
            reserved_blocks,
            evictable_blocks: cached_blocks,
            running_sequences,
            preempted_sequences: self.sequences.len() - running_sequences,
            counters: self.counters,
            ..Stats::default()
        }
    }

    // ---- holds (2) -------------------------------------------------------------------------------------------------

    fn num_cached(&self) -> usize {
        self.queues.iter().map(Vec::len).sum()
    }

    fn node(&self, block: BlockId) -> Option<&Node> {
        self.nodes[block as usize].as_ref()
    }

    fn is_indexed(&self, block: BlockId) -> bool {
        self.node(block).is_some_and(|node| node.is_indexed)
    }

    fn above(&self, block: BlockId) -> Option<BlockId> {
        self.node(block).and_then(|node| node.above)
    }

    fn unqueue(&mut self, block: BlockId) {
        for queue in &mut self.queues {
            queue.retain(|&other| other != block);
        }
    }

    fn hold(&mut self, block: BlockId) {
        let mut next = Some(block);
        while let Some(block) = next {
            self.holds[block as usize] += 1;
            if self.holds[block as usize] > 1 {
                return;
            }
            self.unqueue(block);
            next = self.above(block);
        }
    }

    /// One moment: what loses its last holder becomes cached or free, deepest first.
    fn drop_hold(&mut self, block: BlockId) {
        let mut pending = vec![block];
        while let Some(block) = pending.pop() {
            self.holds[block as usize] -= 1;
            if self.holds[block as usize] > 0 {
                continue;
            }
            pending.extend(self.above(block));
            let clock = self.counters.clock_ticks;
            match &mut self.nodes[block as usize] {
                Some(node) if node.is_indexed => {
                    node.idle_since = clock;
                    let queue = usize::from(node.is_marked);
                    self.queues[queue].push(block);
                }
                _ => {
                    self.nodes[block as usize] = None;
                    self.free.push_back(block);
                    pending.extend(self.withdraw(block));
                }
            }
        }
        self.demote();
    }

    /// 8.3
    fn demote(&mut self) {
        while self.queues.len() > 1 && self.queues[1].len() > self.config.num_blocks / 2 {
            let block = self.queues[1].remove(0);
            self.nodes[block as usize].as_mut().unwrap().is_marked = false;
            self.queues[0].push(block);
        }
    }

    // ---- frames (1, 5) ---------------------------------------------------------------------------------------------

    fn take(&mut self, count: usize) -> Vec<BlockId> {
        (0..count)
            .map(|_| {
                let block = self.free.pop_back().unwrap_or_else(|| self.evict());
                if let Some(source) = self.withdraw(block) {
                    self.drop_hold(source);
                }
                block
            })
            .collect()
    }

    fn evict(&mut self) -> BlockId {
        let block = self.queues.iter().find_map(|queue| queue.first().copied()).unwrap();
        self.unqueue(block);
        self.detach(block);
        let node = self.nodes[block as usize].take().unwrap();
        self.counters.evicted_blocks += 1;
        self.counters.evicted_idle_ticks += self.counters.clock_ticks - node.idle_since;
        self.counters.evicted_hits += node.hits;
        block
    }

    fn withdraw(&mut self, target: BlockId) -> Option<BlockId> {
        let nth = self.copies.iter().position(|&(_, other)| other == target)?;
        Some(self.copies.remove(nth).0)
    }

    fn check_room(&mut self, needed: usize) -> Result<()> {
        let (free, evictable) = (self.free.len(), self.num_cached());
        if needed <= free + evictable {
            return Ok(());
        }
        self.counters.refused_calls += 1;
        Err(Error::OutOfBlocks {
            needed,
            free,
            evictable,
            total: self.config.num_blocks,
            rows: Box::default(),
            reserve: 0,
            tier: Tier::Device,
        })
    }

    // ---- index -----------------------------------------------------------------------------------------------------

    fn children_of(&mut self, namespace: &[u8], above: Option<BlockId>) -> &mut Vec<BlockId> {
        match above {
            Some(above) => &mut self.nodes[above as usize].as_mut().unwrap().children,
            None => self.roots.entry(namespace.to_vec()).or_default(),
        }
    }

    fn detach(&mut self, block: BlockId) {
        let (namespace, above) = {
            let node = self.node(block).unwrap();
            (node.namespace.clone(), node.above)
        };
        self.children_of(&namespace, above).retain(|&child| child != block);
        self.roots.retain(|_, children| !children.is_empty());
    }

    fn block_tokens<'a>(&self, tokens: &'a [Token], number: usize) -> &'a [Token] {
        &tokens[number * self.config.block_size..(number + 1) * self.config.block_size]
    }

    /// Blocks that go on from the end of a path with those of `tokens`, up to block `stop`.
    fn walk(&self, namespace: &[u8], path: &[BlockId], tokens: &[Token], stop: usize) -> Vec<BlockId> {
        let mut found: Vec<BlockId> = Vec::new();
        for number in path.len()..stop {
            let children = match found.last().or(path.last()) {
                Some(&above) => self.node(above).map(|node| &node.children),
                None => self.roots.get(namespace),
            };
            let wanted = self.block_tokens(tokens, number);
            let is_it = |block: &&BlockId| self.node(**block).is_some_and(|node| node.tokens == wanted);
            match children.into_iter().flatten().find(is_it) {
                Some(&child) => found.push(child),
                None => break,
            }
        }
        found
    }

    /// 6.1, 9.1
    fn find(&self, namespace: &[u8], tokens: &[Token]) -> Vec<BlockId> {
        let block_size = self.config.block_size;
        let mut path = self.walk(namespace, &[], tokens, (tokens.len() - 1) / block_size);
        while is_inside_run(tokens, path.len() * block_size) {
            let mut start = path.len() * block_size;
            while start > 0 && tokens[start - 1] >= CONTENT_START {
                start -= 1;
            }
            path.truncate(start / block_size);
        }
        path
    }

    // ---- admission (6) ---------------------------------------------------------------------------------------------

    /// The path that a request hits, if the rest can be had.
    fn plan(&self, namespace: &[u8], tokens: &[Token]) -> Result<Vec<BlockId>> {
        if tokens.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        check_tokens(tokens)?;
        let (blocks, usable) = (tokens.len().div_ceil(self.config.block_size), self.config.usable_blocks());
        if blocks > usable {
            return Err(Error::NeverFits { needed: blocks, usable, tier: Tier::Device });
        }
        let path = self.find(namespace, tokens);
        let needed = blocks - path.len();
        let idle = path.iter().filter(|&&block| self.holds[block as usize] == 0).count();
        let (free, evictable) = (self.free.len(), self.num_cached() - idle);
        let others_run = self.sequences.values().any(|other| other.is_running && !other.is_pinned);
        let reserve = if others_run { self.config.reserve_blocks() } else { 0 };
        for reserve in [0, reserve] {
            let needed = needed + reserve;
            if needed > free + evictable {
                return Err(Error::OutOfBlocks {
                    needed,
                    free,
                    evictable,
                    total: self.config.num_blocks,
                    rows: Box::default(),
                    reserve,
                    tier: Tier::Device,
                });
            }
        }
        Ok(path)
    }

    fn enter(&mut self, sequence: &mut Sequence) -> Result<()> {
        let path = self.plan(&sequence.namespace, &sequence.tokens).inspect_err(|error| {
            let is_refusal = matches!(error, Error::OutOfBlocks { .. } | Error::NeverFits { .. });
            self.counters.refused_calls += u64::from(is_refusal);
        })?;
        if let Some(&last) = path.last() {
            self.hold(last);
        }
        let fresh = self.take(sequence.tokens.len().div_ceil(self.config.block_size) - path.len());
        for &block in &fresh {
            self.hold(block);
        }
        sequence.num_cached = path.len() * self.config.block_size;
        sequence.num_committed = sequence.num_cached;
        sequence.table = path.iter().chain(&fresh).copied().collect();
        sequence.path = path;
        (sequence.is_running, sequence.publishes) = (true, true);
        Ok(())
    }

    fn register(&mut self, sequence: Sequence) -> u64 {
        self.sequences.insert(self.next_serial, sequence);
        self.next_serial += 1;
        self.next_serial - 1
    }

    pub fn admit(&mut self, tokens: &[Token], namespace: &[u8], is_pinned: bool) -> Result<u64> {
        let mut sequence = Sequence {
            tokens: tokens.to_vec(),
            namespace: namespace.to_vec(),
            is_pinned,
            is_running: false,
            table: Vec::new(),
            path: Vec::new(),
            num_cached: 0,
            num_committed: 0,
            publishes: false,
            lost_tokens: 0,
            num_preemptions: 0,
            back: None,
        };
        self.enter(&mut sequence)?;
        for &block in &sequence.path {
            let node = self.nodes[block as usize].as_mut().unwrap();
            node.hits += 1;
            node.is_marked = self.config.policy == PolicyKind::Slru;
        }
        self.counters.admitted_sequences += 1;
        self.counters.queried_tokens += tokens.len() as u64;
        self.counters.hit_tokens += sequence.num_cached as u64;
        Ok(self.register(sequence))
    }

    /// (Tokens that an admit would hit, would it succeed?)
    pub fn peek(&self, tokens: &[Token], namespace: &[u8]) -> Result<(usize, bool)> {
        let can_admit = match self.plan(namespace, tokens) {
            Ok(_) => true,
            Err(Error::OutOfBlocks { .. } | Error::NeverFits { .. }) => false,
            Err(error) => return Err(error),
        };
        Ok((self.find(namespace, tokens).len() * self.config.block_size, can_admit))
    }

    // ---- sequences -------------------------------------------------------------------------------------------------

    /// Runs a call on a sequence in the state that the call needs.
    fn with<R>(
        &mut self,
        serial: u64,
        call: &'static str,
        is_running: bool,
        run: impl FnOnce(&mut Self, &mut Sequence) -> Result<R>,
    ) -> Result<R> {
        let Some(mut sequence) = self.sequences.get(&serial).cloned() else {
            return Err(Error::Stale { sequence: serial, state: "released", call });
        };
        if sequence.is_running != is_running {
            let state = if sequence.is_running { "running" } else { "preempted" };
            return Err(Error::Stale { sequence: serial, state, call });
        }
        let result = run(self, &mut sequence)?;
        self.sequences.insert(serial, sequence);
        Ok(result)
    }

    fn slots_of(&self, sequence: &Sequence, start: usize, stop: usize) -> Vec<i64> {
        let size = self.config.block_size;
        let slot =
            |position: usize| i64::from(sequence.table[position / size]) * size as i64 + (position % size) as i64;
        (start..stop).map(slot).collect()
    }

    /// 4.1: the table positions among these token positions whose block somebody else reads.
    fn unwritable(&self, sequence: &Sequence, start: usize, stop: usize) -> Vec<usize> {
        let positions: BTreeSet<usize> = (start..stop).map(|position| position / self.config.block_size).collect();
        let is_shared = |&position: &usize| {
            let Some(&block) = sequence.table.get(position) else { return false };
            let readers = self.copies.iter().filter(|&&(source, _)| source == block).count() as u32;
            self.node(block).is_some() || self.holds[block as usize] - readers > 1
        };
        positions.into_iter().filter(is_shared).collect()
    }

    /// 4.2, 4.4, 5.2
    fn make_writable(&mut self, sequence: &mut Sequence, positions: &[usize], growth: usize) {
        let mut fresh = self.take(positions.len() + growth);
        let grown = fresh.split_off(positions.len());
        for (&position, &new) in positions.iter().zip(&fresh) {
            let old = std::mem::replace(&mut sequence.table[position], new);
            self.hold(new);
            if sequence.num_committed > position * self.config.block_size {
                let source = self.copies.iter().find(|&&(_, target)| target == old).map_or(old, |&(source, _)| source);
                self.copies.push((source, new));
                self.hold(source);
            }
            self.drop_hold(old);
        }
        for new in grown {
            self.hold(new);
            sequence.table.push(new);
        }
    }

    pub fn extend(&mut self, serial: u64, tokens: &[Token], call: &'static str) -> Result<Vec<i64>> {
        self.with(serial, call, true, |naive, sequence| {
            check_tokens(tokens)?;
            let (start, stop) = (sequence.tokens.len(), sequence.tokens.len() + tokens.len());
            let shared = naive.unwritable(sequence, start, stop);
            let growth = stop.div_ceil(naive.config.block_size) - sequence.table.len();
            naive.check_room(shared.len() + growth)?;
            naive.make_writable(sequence, &shared, growth);
            sequence.tokens.extend_from_slice(tokens);
            Ok(naive.slots_of(sequence, start, stop))
        })
    }

    pub fn slots(&mut self, serial: u64, start: usize, stop: usize) -> Result<Vec<i64>> {
        self.with(serial, "slots", true, |naive, sequence| {
            if start < sequence.num_committed || stop < start || sequence.tokens.len() < stop {
                return Err(Error::Value(String::new()));
            }
            let shared = naive.unwritable(sequence, start, stop);
            naive.check_room(shared.len())?;
            naive.make_writable(sequence, &shared, 0);
            Ok(naive.slots_of(sequence, start, stop))
        })
    }

    pub fn take_copies(&mut self) -> Vec<(BlockId, BlockId)> {
        let pairs = std::mem::take(&mut self.copies);
        for &(source, _) in &pairs {
            self.drop_hold(source);
        }
        self.counters.copies += pairs.len() as u64;
        pairs
    }

    pub fn fork(&mut self, serial: u64, count: usize) -> Result<Vec<u64>> {
        self.with(serial, "fork", true, |naive, sequence| {
            if count == 0 {
                return Err(Error::Value(String::new()));
            }
            let mut children = Vec::new();
            for _ in 0..count {
                let child = Sequence { is_pinned: false, lost_tokens: 0, back: None, ..sequence.clone() };
                for block in child.loose_from(0).into_iter().chain(child.path.last().copied()) {
                    naive.hold(block);
                }
                children.push(naive.register(child));
            }
            Ok(children)
        })
    }

    pub fn truncate(&mut self, serial: u64, len: usize) -> Result<()> {
        self.with(serial, "truncate", true, |naive, sequence| {
            if len == 0 || len > sequence.tokens.len() {
                return Err(Error::Value(String::new()));
            }
            let (kept, full) = (len.div_ceil(naive.config.block_size), len / naive.config.block_size);
            let mut dropped = sequence.loose_from(kept);
            // New holds first (2.5): the block that is cut in two, then the shorter path.
            if kept > full && sequence.is_on_path(full) {
                naive.hold(sequence.table[full]);
            }
            if full < sequence.path.len() {
                dropped.extend(sequence.path.last());
                sequence.path.truncate(full);
                if let Some(&last) = sequence.path.last() {
                    naive.hold(last);
                }
            }
            sequence.table.truncate(kept);
            sequence.tokens.truncate(len);
            sequence.num_cached = sequence.num_cached.min(len);
            sequence.num_committed = sequence.num_committed.min(len);
            for block in dropped {
                naive.drop_hold(block);
            }
            Ok(())
        })
    }

    fn leave(&mut self, sequence: &mut Sequence) {
        for block in sequence.loose_from(0).into_iter().chain(sequence.path.last().copied()) {
            self.drop_hold(block);
        }
        sequence.table.clear();
        sequence.path.clear();
        sequence.is_running = false;
    }

    pub fn preempt(&mut self, serial: u64) -> Result<()> {
        self.with(serial, "preempt", true, |naive, sequence| {
            naive.leave(sequence);
            sequence.lost_tokens = sequence.num_committed;
            (sequence.num_cached, sequence.num_committed) = (0, 0);
            naive.counters.preemptions += 1;
            sequence.num_preemptions += 1;
            Ok(())
        })
    }

    pub fn resume(&mut self, serial: u64) -> Result<()> {
        self.with(serial, "resume", false, |naive, sequence| {
            naive.enter(sequence)?;
            naive.counters.recomputed_tokens += sequence.lost_tokens.saturating_sub(sequence.num_cached) as u64;
            naive.num_returns += 1;
            sequence.back = Some((naive.next_serial, naive.num_returns));
            Ok(())
        })
    }

    pub fn release(&mut self, serial: u64, departure: Departure) {
        let Some(mut sequence) = self.sequences.remove(&serial) else {
            self.counters.noop_calls += 1;
            return;
        };
        self.counters.finished_sequences += u64::from(departure == Departure::Finished);
        self.leave(&mut sequence);
        self.counters.clock_ticks += 1;
    }

    pub fn release_dropped(&mut self, serial: u64) {
        if self.sequences.contains_key(&serial) {
            self.release(serial, Departure::Aborted);
            self.counters.dropped_handles += 1;
        }
    }

    // ---- publishing (7, 9.2) ---------------------------------------------------------------------------------------

    pub fn commit(&mut self, serial: u64, end: Option<usize>) -> Result<()> {
        self.with(serial, "commit", true, |naive, sequence| {
            let end = end.unwrap_or(sequence.tokens.len());
            if end > sequence.tokens.len() {
                return Err(Error::Value(String::new()));
            }
            let block_size = naive.config.block_size;
            let fills_a_block = end / block_size > sequence.num_committed / block_size;
            naive.counters.computed_tokens += end.saturating_sub(sequence.num_committed) as u64;
            sequence.num_committed = sequence.num_committed.max(end);
            if fills_a_block {
                naive.publish(sequence);
            }
            Ok(())
        })
    }

    fn publish(&mut self, sequence: &mut Sequence) {
        while self.config.prefix_cache && sequence.publishes {
            let Some(stop) = self.next_unit(sequence) else { return };
            let start = sequence.path.len();
            let found = self.walk(&sequence.namespace, &sequence.path, &sequence.tokens, stop);
            let is_partial = !found.is_empty() && found.len() < stop - start;
            let was_indexed =
                found.is_empty() && sequence.table[start..stop].iter().any(|&own| self.node(own).is_some());
            if is_partial || was_indexed {
                return;
            }
            for position in start..stop {
                self.join(sequence, found.get(position - start).copied());
            }
        }
    }

    fn next_unit(&self, sequence: &Sequence) -> Option<usize> {
        let block_size = self.config.block_size;
        let ends = sequence.path.len() + 1..=sequence.num_committed / block_size;
        ends.into_iter().find(|end| !is_inside_run(&sequence.tokens, end * block_size))
    }

    fn join(&mut self, sequence: &mut Sequence, found: Option<BlockId>) {
        let position = sequence.path.len();
        let (own, above) = (sequence.table[position], sequence.path.last().copied());
        let block = found.unwrap_or(own);
        if found.is_none() {
            self.nodes[own as usize] = Some(Node {
                above,
                namespace: sequence.namespace.clone(),
                tokens: self.block_tokens(&sequence.tokens, position).to_vec(),
                children: Vec::new(),
                is_indexed: true,
                hits: 0,
                is_marked: false,
                idle_since: 0,
            });
            self.children_of(&sequence.namespace, above).push(own);
            // It is held, so it holds its parent.
            if let Some(above) = above {
                self.hold(above);
            }
        }
        self.hold(block);
        sequence.path.push(block);
        if block == own {
            self.drop_hold(own);
        }
        if let Some(above) = above {
            self.drop_hold(above);
        }
    }

    // ---- reset and forget (10) -------------------------------------------------------------------------------------

    pub fn reset(&mut self, identity: Option<&[u8]>) -> Result<()> {
        if identity.is_some_and(|identity| identity.len() > 1 << 16) {
            return Err(Error::Config(String::new()));
        }
        for queue in &mut self.queues {
            for block in std::mem::take(queue) {
                self.nodes[block as usize] = None;
                self.free.push_front(block);
            }
        }
        for node in self.nodes.iter_mut().flatten() {
            node.is_indexed = false;
            node.children.clear();
        }
        self.roots.clear();
        for sequence in self.sequences.values_mut() {
            sequence.publishes = false;
        }
        Ok(())
    }

    pub fn forget(&mut self, tokens: &[Token], namespace: &[u8]) -> Result<usize> {
        check_tokens(tokens)?;
        if tokens.is_empty() || !tokens.len().is_multiple_of(self.config.block_size) {
            return Err(Error::Value(String::new()));
        }
        let stop = tokens.len() / self.config.block_size;
        let path = self.walk(namespace, &[], tokens, stop);
        if path.len() < stop {
            return Ok(0);
        }
        let mut gone = Vec::new();
        self.post_order(path[stop - 1], &mut gone);
        self.detach(path[stop - 1]);
        let idle: Vec<BlockId> = gone.iter().copied().filter(|&block| self.holds[block as usize] == 0).collect();
        for &block in &gone {
            let node = self.nodes[block as usize].as_mut().unwrap();
            node.is_indexed = false;
            node.children.clear();
        }
        for &block in &idle {
            self.unqueue(block);
            self.nodes[block as usize] = None;
        }
        for block in idle {
            self.free.push_back(block);
            if let Some(source) = self.withdraw(block) {
                self.drop_hold(source);
            }
        }
        let serials: Vec<u64> = self.sequences.keys().copied().collect();
        for serial in serials {
            let is_cut = self.sequences[&serial].path.last().is_some_and(|&last| !self.is_indexed(last));
            self.sequences.get_mut(&serial).unwrap().publishes &= !is_cut;
        }
        Ok(gone.len())
    }

    fn post_order(&self, top: BlockId, out: &mut Vec<BlockId>) {
        for &child in &self.node(top).unwrap().children {
            self.post_order(child, out);
        }
        out.push(top);
    }
}

fn is_inside_run(tokens: &[Token], position: usize) -> bool {
    let is_content = |at: usize| tokens[at] >= CONTENT_START;
    0 < position && position < tokens.len() && is_content(position - 1) && is_content(position)
}

fn check_tokens(tokens: &[Token]) -> Result<()> {
    match tokens.iter().position(|&token| token >= TOKEN_END) {
        Some(position) => Err(Error::Token { position, value: tokens[position] }),
        None => Ok(()),
    }
}
