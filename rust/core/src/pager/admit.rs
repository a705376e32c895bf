//! Admission: match, hold, take. And its peeks, which decide by the same code and change nothing.

use super::Pager;
use super::computing::Computing;
use crate::admission::Life;
use crate::batch::Seat;
use crate::error::{Error, Result};
use crate::evict::Departure;
use crate::ids::{BlockId, CONTENT_START, Handle, NodeId, TOKEN_END, Token};
use crate::index::{Found, trace};
use crate::memory::with_capacity;
use crate::sequence::{Sequence, State};
use crate::tail::{Tail, union_of_bits};
use crate::transfers::Tier;

/// Room in a new table beyond the prompt's blocks.
const TABLE_ROOM: usize = 8;

/// What an admission would find.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PrefixMatch {
    /// Tokens whose KV is cached.
    pub num_tokens: usize,
    /// Blocks of those.
    pub num_blocks: usize,
    /// Who computes what follows.
    pub computing: Option<Computing>,
}

/// An admission that can be carried out.
pub(super) struct Admission {
    /// The cached prefix; none without a root.
    pub(super) found: Option<Found>,
    /// Blocks of the whole request.
    pub(super) blocks: usize,
    /// Where the blocks behind the prefix come from.
    pub(super) supply: Supply,
}

/// Where the first blocks behind a cached prefix come from. (The others are taken as usual.)
#[derive(Clone, Default, Debug)]
pub(super) enum Supply {
    /// They are taken as usual.
    #[default]
    Usual,
    /// So many are taken for a transfer to fill.
    Transfer(usize),
    /// They are these, which others hold, too.
    Shared(Vec<BlockId>),
}

impl Admission {
    fn hit_blocks(&self) -> usize {
        self.found.map_or(0, |found| found.blocks)
    }
}

impl Pager {
    /// Admits a prompt: pins its cached prefix and takes blocks for the rest, or does nothing.
    ///
    /// # Errors
    /// `EmptyPrompt`, `Token`; `NeverFits` if the pool is too small; `OutOfBlocks` if there is no room now; `Memory`.
    pub fn admit(&mut self, tokens: &[Token], namespace: &[u8], pinned: bool) -> Result<Handle> {
        let plan = self.plan(tokens, namespace);
        let admission = self.counted(plan)?;
        self.begin(tokens, namespace, pinned, &admission)
    }

    /// A sequence that can be admitted begins.
    pub(super) fn begin(
        &mut self,
        tokens: &[Token],
        namespace: &[u8],
        pinned: bool,
        admission: &Admission,
    ) -> Result<Handle> {
        self.sequences.reserve(1)?;
        let root = self.pin_root(namespace)?;
        let mut sequence = Box::new(Sequence {
            serial: self.sequences.next_serial(),
            slot: 0,
            announced: None,
            state: State::Running,
            pinned,
            has_content: false,
            seat: Seat::None,
            is_silent: false,
            root,
            end: root,
            path_blocks: 0,
            first_duplicate: Sequence::NO_DUPLICATE,
            table: Vec::new(),
            tail: Tail::default(),
            len: tokens.len(),
            num_cached: 0,
            num_committed: 0,
            lost_tokens: 0,
            num_preemptions: 0,
            back: (0, 0),
            plan: None,
            away: None,
            life: Life { prompt: tokens.len() as u32, ..Life::default() },
        });
        if let Err(error) = self.carry_out(&mut sequence, root, tokens, admission, true) {
            self.unpin_root(root);
            return Err(error);
        }
        self.counters.admitted_sequences += 1;
        self.counters.queried_tokens += tokens.len() as u64;
        self.counters.hit_tokens += u64::from(sequence.num_cached);
        let handle = self.sequences.insert(sequence);
        if let Some(mut sequence) = self.sequences.take(handle) {
            sequence.slot = handle.slot;
            self.announce(&mut sequence);
            self.sequences.put_back(handle, sequence);
        }
        Ok(handle)
    }

    /// Admits a preempted sequence again; answers nothing new: the handle is the same.
    ///
    /// # Errors
    /// `Stale` unless it is preempted; `OutOfBlocks`; `Memory`.
    pub fn resume(&mut self, handle: Handle) -> Result<()> {
        let state = self.sequence(handle, "resume")?.state;
        let from = if state == State::Swapped { State::Swapped } else { State::Preempted };
        self.with_state(handle, "resume", from, |pager, sequence| {
            let mut tokens = with_capacity(sequence.len)?;
            pager.copy_tokens(sequence, &mut tokens);
            let mut name = with_capacity(pager.index.root(sequence.root).name.len())?;
            name.extend_from_slice(&pager.index.root(sequence.root).name);
            let plan = pager.plan(&tokens, &name);
            let admission = pager.counted(plan)?;
            // After a reset the namespace has a new root. The sequence moves there: it publishes again.
            let root = pager.pin_root(&name)?;
            let committed = sequence.num_committed;
            if let Err(error) = pager.carry_out(sequence, root, &tokens, &admission, false) {
                pager.unpin_root(root);
                return Err(error);
            }
            pager.unpin_root(std::mem::replace(&mut sequence.root, root));
            sequence.is_silent = false;
            if from == State::Swapped {
                sequence.lost_tokens = committed as u32;
                pager.give_back_host(sequence);
            } else {
                pager.num_preempted -= 1;
            }
            sequence.state = State::Running;
            pager.note_return(sequence);
            pager.announce(sequence);
            pager.counters.recomputed_tokens += u64::from(sequence.lost_tokens.saturating_sub(sequence.num_cached));
            Ok(())
        })
    }

    /// Would `admit` succeed now? A peek.
    ///
    /// # Errors
    /// `EmptyPrompt`, `Token`.
    pub fn can_admit(&self, tokens: &[Token], namespace: &[u8]) -> Result<bool> {
        match self.plan(tokens, namespace) {
            Ok(admission) => check_tokens(tokens, admission.hit_blocks() * self.config.block_size).map(|()| true),
            Err(Error::OutOfBlocks { .. } | Error::NeverFits { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// How much of the prompt `admit` would find cached. A peek: not even recency changes.
    ///
    /// # Errors
    /// `EmptyPrompt`, `Token`.
    pub fn find_prefix(&self, tokens: &[Token], namespace: &[u8]) -> Result<PrefixMatch> {
        check_len(tokens)?;
        let found = self.find(tokens, namespace);
        let num_blocks = found.map_or(0, |found| found.blocks);
        let num_tokens = num_blocks * self.config.block_size;
        check_tokens(tokens, num_tokens)?;
        let computing = found.and_then(|found| self.computing_behind(found, tokens));
        Ok(PrefixMatch { num_tokens, num_blocks, computing })
    }

    pub(super) fn find(&self, tokens: &[Token], namespace: &[u8]) -> Option<Found> {
        let root = self.index.find_root(namespace)?;
        // The last token is always computed, in a private block, so that no indexed block is ever written again (I4).
        Some(self.index.find(root, tokens, (tokens.len() - 1) / self.config.block_size))
    }

    /// Decides whether a request can be admitted. Tokens are checked here only if it cannot: else they are checked as
    /// they are copied.
    pub(super) fn plan(&self, tokens: &[Token], namespace: &[u8]) -> Result<Admission> {
        check_len(tokens)?;
        let blocks = tokens.len().div_ceil(self.config.block_size);
        let usable = self.config.usable_blocks();
        if blocks > usable {
            check_tokens(tokens, 0)?;
            return Err(Error::NeverFits { needed: blocks, usable, tier: Tier::Device });
        }
        let found = self.find(tokens, namespace);
        self.plan_from(found, blocks, Supply::Usual, || check_tokens(tokens, 0))
    }

    /// Decides whether a request for so many blocks can be admitted behind what was found. `check` is called before a
    /// refusal.
    pub(super) fn plan_from(
        &self,
        found: Option<Found>,
        blocks: usize,
        supply: Supply,
        check: impl FnOnce() -> Result<()>,
    ) -> Result<Admission> {
        let admission = Admission { found, blocks, supply };
        let shared = if let Supply::Shared(shared) = &admission.supply { shared.len() } else { 0 };
        let needed = blocks - admission.hit_blocks() - shared;
        let free = self.num_free_blocks();
        let evictable = self.num_evictable_blocks() - found.map_or(0, |found| self.idle_blocks(found, |_| true));
        let others = self.num_running - self.num_running_pinned;
        let reserve = if others > 0 { self.config.reserve_blocks() } else { 0 };
        if needed + reserve > free + evictable {
            check()?;
            let reserve = if needed > free + evictable { 0 } else { reserve };
            let (needed, total) = (needed + reserve, self.config.num_blocks);
            let (rows, tier) = (Box::default(), Tier::Device);
            return Err(Error::OutOfBlocks { needed, free, evictable, total, rows, reserve, tier });
        }
        if let Supply::Transfer(brought) = admission.supply {
            let (fenced_free, fenced_evictable) = self.num_fenced();
            let on_path = found.map_or(0, |found| self.idle_blocks(found, |node| self.fences.has_node(node)));
            let (free, evictable) = (free - fenced_free, evictable - (fenced_evictable - on_path));
            if brought > free + evictable {
                check()?;
                let (needed, total, rows, tier) = (brought, self.config.num_blocks, Box::default(), Tier::Device);
                return Err(Error::OutOfBlocks { needed, free, evictable, total, rows, reserve: 0, tier });
            }
        }
        Ok(admission)
    }

    /// Blocks of a found path that are cached now and would be held: of those nodes that `counts` says.
    pub(super) fn idle_blocks(&self, found: Found, counts: impl Fn(NodeId) -> bool) -> usize {
        self.index.idle_blocks(found, |node| !self.evict.slot(node).is_in_transit() && counts(node))
    }

    /// Gives the sequence its path, table and tail. Refused by the allocator or for a bad token, it has changed
    /// nothing that shows.
    fn carry_out(
        &mut self,
        sequence: &mut Sequence,
        root: NodeId,
        tokens: &[Token],
        admission: &Admission,
        is_admit: bool,
    ) -> Result<()> {
        let block_size = self.config.block_size;
        let hit_blocks = admission.hit_blocks();
        let hit_tokens = hit_blocks * block_size;
        let (tail, bits) = Tail::from_tokens(&tokens[hit_tokens..], block_size)?;
        if bits >= TOKEN_END {
            check_tokens(tokens, hit_tokens)?;
        }
        let mut table = with_capacity(admission.blocks + TABLE_ROOM)?;
        let end = match admission.found {
            Some(found) if found.blocks > 0 => self.end_at(found)?,
            _ => root,
        };

        self.hold(end, 1);
        table.resize(hit_blocks, 0);
        self.walk_path(end, &mut table, is_admit);
        self.count_refaults(end, &tokens[hit_tokens..]);
        match &admission.supply {
            Supply::Usual => {}
            Supply::Transfer(count) => self.take_unfenced(*count, &mut table),
            Supply::Shared(blocks) => {
                for &block in blocks {
                    self.blocks.hold(block, 1);
                    table.push(block);
                }
            }
        }
        self.take(admission.blocks - table.len(), &mut table);
        (sequence.end, sequence.path_blocks) = (end, hit_blocks);
        (sequence.table, sequence.tail) = (table, tail);
        sequence.has_content |= bits >= CONTENT_START;
        (sequence.num_cached, sequence.num_committed) = (hit_tokens as u32, hit_tokens);
        self.count_running(sequence, true);
        if is_admit {
            self.evict.policy().on_admit(Self::context(sequence, Departure::Moved), hit_blocks);
        }
        Ok(())
    }

    /// How much of what follows a hit was evicted not long ago. The last token is always computed.
    fn count_refaults(&mut self, end: NodeId, tokens: &[Token]) {
        if self.config.num_ghost_blocks == 0 {
            return;
        }
        let mut trace = self.index.trace(end);
        for block in tokens[..tokens.len() - 1].chunks_exact(self.config.block_size) {
            trace = trace::after(trace, block);
            let Some(number) = self.ghosts.take(trace) else { break };
            self.counters.refaulted_blocks += 1;
            self.counters.refault_distance += self.counters.evicted_blocks - number - 1;
        }
    }

    /// The node that ends exactly where a found path ends: splits one if need be.
    pub(super) fn end_at(&mut self, found: Found) -> Result<NodeId> {
        if found.node.is_root() || found.within == self.index[found.node].run.len() {
            return Ok(found.node);
        }
        self.split(found.node, found.within)
    }

    /// Fills in the ids of a path, and counts a hit of each node if `is_hit`.
    fn walk_path(&mut self, end: NodeId, table: &mut [BlockId], is_hit: bool) {
        let (mut node, mut stop) = (end, table.len());
        while !node.is_root() {
            let run = &self.index[node].run;
            let start = stop - run.len();
            table[start..stop].copy_from_slice(run.blocks(self.config.block_size));
            if is_hit {
                self.evict.hit(node);
            }
            (node, stop) = (self.index[node].parent, start);
        }
    }

    /// The live root of a namespace, held for a sequence before anything is evicted: the eviction may take its last
    /// block.
    fn pin_root(&mut self, namespace: &[u8]) -> Result<NodeId> {
        let root = self.index.find_or_make_root(namespace)?;
        self.index.root_mut(root).pins += 1;
        Ok(root)
    }

    /// A sequence no longer belongs to this root.
    pub(super) fn unpin_root(&mut self, root: NodeId) {
        self.index.root_mut(root).pins -= 1;
        self.index.drop_root_if_unused(root);
    }
}

/// A prompt has at least one token, and positions fit an i32.
fn check_len(tokens: &[Token]) -> Result<()> {
    if tokens.is_empty() {
        return Err(Error::EmptyPrompt);
    }
    if tokens.len() >= TOKEN_END as usize {
        return Err(Error::Value(format!("{} tokens; a sequence has fewer than 2147483648", tokens.len())));
    }
    Ok(())
}

/// A prompt of which nothing is known.
pub(super) fn check_prompt(tokens: &[Token]) -> Result<()> {
    check_len(tokens)?;
    check_tokens(tokens, 0)
}

/// Checks the values from a position on. What was hit needs no check: it equals what was checked before.
pub(crate) fn check_tokens(tokens: &[Token], from: usize) -> Result<()> {
    if union_of_bits(&tokens[from..]) < TOKEN_END {
        return Ok(());
    }
    let Some(position) = (from..tokens.len()).find(|&position| tokens[position] >= TOKEN_END) else {
        return Ok(());
    };
    Err(Error::Token { position, value: tokens[position] })
}
