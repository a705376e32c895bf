//! The store: host blocks go to it (*save*) before the host needs their room, and come back (*load*) when a prompt wants
//! them, also after a restart. `docs/design/rules.md` 17.
//!
//! The pager knows keys, not stores. A save reads blocks that keep their place in the host's queue; a load fills blocks
//! of its own, which join the host's index when they are there.

use super::Pager;
use super::plans::End;
use crate::content;
use crate::digest::{Digest, Records, root};
use crate::error::{Error, Result};
use crate::host::{Adopted, Host};
use crate::ids::{BlockId, CONTENT_START, NodeId, Token};
use crate::memory::with_capacity;
use crate::transfers::{Load, PlanId, Work};

/// A save in the making.
#[derive(Default)]
struct Draft {
    sources: Vec<BlockId>,
    targets: Vec<BlockId>,
    chains: Vec<(NodeId, usize)>,
    records: Records,
}

impl Pager {
    /// The keys of a token list's full blocks, as far as they are certain: a run of content tokens at the end may go on.
    ///
    /// # Errors
    /// `EmptyPrompt`, `Token`, `Memory`.
    pub fn store_keys(&self, tokens: &[Token], namespace: &[u8]) -> Result<Records> {
        super::admit::check_prompt(tokens)?;
        let block_size = self.config.block_size;
        let blocks = whole_units(tokens, tokens.len() / block_size, block_size);
        let top = root(&self.config.identity, namespace, block_size);
        Records::below(top, &tokens[..blocks * block_size], block_size)
    }

    // ---- save ------------------------------------------------------------------------------------------------------

    /// Plans to bring the host's coldest cached blocks to a store that it has not had, some `num_blocks`. None if there are
    /// none.
    ///
    /// # Errors
    /// `Value` for no blocks; `Transfer` without a host tier; `Memory`.
    pub fn save(&mut self, num_blocks: usize) -> Result<Option<PlanId>> {
        if num_blocks == 0 {
            return Err(Error::Value("num_blocks is 0; it must be 1 or more".to_owned()));
        }
        self.plans.reserve()?;
        let mut draft = Draft::default();
        let Self { host, config, .. } = self;
        let host = host.as_mut().ok_or_else(|| no_host("save"))?;
        host.stored.reserve(host.num_blocks())?;
        let filled = fill_save(host, &config.identity, num_blocks, &mut draft);
        if draft.chains.is_empty() {
            return filled.map(|()| None);
        }
        // Where the allocator refused, what there is is a plan.
        let work = Work::Save { chains: draft.chains, records: draft.records };
        Ok(Some(self.plans.insert(draft.sources, draft.targets, work)))
    }

    /// A save has ended: what was done is stored.
    pub(super) fn end_save(&mut self, chains: &[(NodeId, usize)], blocks: &[BlockId], end: End<'_>) {
        let Some(host) = &mut self.host else { return };
        let mut at = 0;
        for &(node, len) in chains {
            // As many of its last blocks as these were forgotten, or more than it has.
            let forgotten = usize::MAX - host.index.live_part(node, usize::MAX).blocks;
            // What is behind a hole would not be found without it.
            let num_stored = (at..at + len.saturating_sub(forgotten)).take_while(|&nth| end.is_done(nth)).count();
            for (nth, &block) in blocks[at..at + len].iter().enumerate() {
                host.stored.end(block, nth < num_stored);
            }
            self.counters.saved_blocks += num_stored as u64;
            if matches!(end, End::Failed(_)) && !end.is_done(at) {
                host.doubt_above(node, len);
            }
            at += len;
            host.let_go_for_plan(node);
        }
    }

    // ---- load ------------------------------------------------------------------------------------------------------

    /// Plans to bring what the host lacks of a prompt's first `num_tokens` tokens, which a store has. None if it lacks
    /// nothing, or has no room. Where it is on its way already, the plan that brings it.
    ///
    /// # Errors
    /// `EmptyPrompt`, `Token`; `Transfer` without a host tier; `Memory`.
    pub fn load(&mut self, tokens: &[Token], namespace: &[u8], num_tokens: usize) -> Result<Option<PlanId>> {
        super::admit::check_prompt(tokens)?;
        let block_size = self.config.block_size;
        self.plans.reserve()?;
        let host = self.host.as_mut().ok_or_else(|| no_host("load"))?;
        let safe = |blocks| content::cut_back(tokens.len(), |at| tokens[at], blocks, block_size);
        let wanted = safe((num_tokens / block_size).min((tokens.len() - 1) / block_size));
        let found = host.find(namespace, tokens, wanted);
        let start = found.map_or(0, |found| found.blocks);
        if wanted <= start {
            return Ok(None);
        }
        let top = root(&self.config.identity, namespace, block_size);
        let mut records = Records::below(top, &tokens[..wanted * block_size], block_size)?;
        if let Some(id) = self.plans.load_at(&records.keys[start]) {
            return Ok(Some(id));
        }
        let room = host.room() - found.map_or(0, |found| host.idle_blocks(found));
        let stop = safe(wanted.min(start + room));
        if stop <= start {
            return Ok(None);
        }
        records.keep(start..stop, block_size);
        let mut name = with_capacity(namespace.len())?;
        name.extend_from_slice(namespace);
        let mut path = with_capacity(stop * block_size)?;
        path.extend_from_slice(&tokens[..stop * block_size]);
        let mut targets = with_capacity(stop - start)?;
        let mut sources = with_capacity(stop - start)?;
        sources.extend(0..(stop - start) as u32);
        host.stored.reserve(host.num_blocks())?;
        // A split does not show; after it nothing can be refused.
        let above = found.map(|found| host.end_at(found)).transpose()?;
        if let Some(above) = above {
            host.hold(above);
        }
        host.take(stop - start, &mut targets);
        let namespace = name.into_boxed_slice();
        let load = Load { namespace, tokens: path, start, stop, above, records };
        Ok(Some(self.plans.insert(sources, targets, Work::Load(Box::new(load)))))
    }

    /// A load has ended, and so many of its first blocks arrived. Answers, in `lost`, the host blocks that came to nothing.
    pub(super) fn end_load(&mut self, load: &Load, targets: &[BlockId], arrived: usize, lost: &mut Vec<BlockId>) {
        let clock = self.counters.clock_ticks;
        let Some(host) = &mut self.host else { return };
        let wanted = arrived.min(load.stop.saturating_sub(load.start));
        let adopted = match wanted {
            0 => None,
            _ => host.adopt(&load.namespace, &load.tokens, load.start, &targets[..wanted]),
        };
        if let Some(above) = load.above {
            host.let_go(above, clock);
        }
        let new = adopted.as_ref().map_or(0..0, |adopted| adopted.new.start - load.start..adopted.new.end - load.start);
        for nth in new.clone() {
            host.stored.set(targets[nth], load.records.keys[nth]);
        }
        if let Some(Adopted { end, .. }) = adopted {
            host.let_go(end, clock);
        }
        self.counters.loaded_blocks += new.len() as u64;
        lost.extend_from_slice(&targets[..new.start]);
        lost.extend_from_slice(&targets[new.end..]);
    }
}

fn no_host(call: &str) -> Error {
    Error::Transfer(format!("{call}: this pager has no host blocks; build it with num_host_blocks"))
}

/// The most blocks of a list, at most `blocks`, of which none is in a run of content tokens that may go on behind the list.
fn whole_units(tokens: &[Token], blocks: usize, block_size: usize) -> usize {
    let token = |at: usize| tokens.get(at).copied().unwrap_or(CONTENT_START);
    content::cut_back(tokens.len() + 1, token, blocks, block_size)
}

fn fill_save(host: &mut Host, identity: &[u8], wanted: usize, draft: &mut Draft) -> Result<()> {
    while draft.sources.len() < wanted
        && let Some(node) = host.evict.unoffered(0)
    {
        if !draft_chain(host, identity, node, wanted - draft.sources.len(), draft)? {
            host.evict.set_offered(0, node);
        }
    }
    Ok(())
}

/// Adds the first blocks of a path that no store has had, some `wanted`. False if there are none.
fn draft_chain(host: &mut Host, identity: &[u8], node: NodeId, wanted: usize, draft: &mut Draft) -> Result<bool> {
    let block_size = host.index.block_size();
    let (count, above) = unsaved(host, node);
    if count == 0 {
        return Ok(false);
    }
    // With the block above them, if there is one: a chain must not begin within a run of content tokens.
    let with_above = count + usize::from(above.is_some());
    let (mut tokens, mut blocks) = (with_capacity(with_above * block_size)?, with_capacity(with_above)?);
    host.index.push_last(node, with_above, &mut tokens, &mut blocks);
    let most = whole_units(&tokens, with_above, block_size);
    let first = with_above - count;
    let is_inside = |end: usize| content::spans(tokens[end * block_size - 1], tokens[end * block_size]);
    if most <= first || (first > 0 && is_inside(first)) {
        return Ok(false);
    }
    let stop = (first + wanted..most).find(|&end| !is_inside(end)).unwrap_or(most);
    let len = stop - first;
    let key = match above {
        // Where it ends in a content token, its key is of the run that it was saved with, which may be another.
        Some(key) if tokens[first * block_size - 1] < CONTENT_START => key,
        _ => key_above(host, identity, node, count)?,
    };

    // A split does not show; after it nothing can be refused.
    draft.sources.try_reserve(len)?;
    draft.targets.try_reserve(len)?;
    draft.chains.try_reserve(1)?;
    draft.records.reserve(len, block_size)?;
    let end = host.end_at(host.index.above_last(node, with_above - stop))?;
    draft.records.push(key, &tokens[first * block_size..stop * block_size], block_size);
    draft.sources.extend_from_slice(&blocks[first..stop]);
    let next = draft.targets.len() as u32;
    draft.targets.extend(next..next + len as u32);
    draft.chains.push((end, len));
    let keys = &draft.records.keys[draft.records.keys.len() - len..];
    for (&block, &key) in blocks[first..stop].iter().zip(keys) {
        host.stored.begin(block, key);
    }
    host.hold_for_plan(end);
    Ok(true)
}

/// The key of the block above the last `count` of a path, from its top on.
fn key_above(host: &Host, identity: &[u8], node: NodeId, count: usize) -> Result<Digest> {
    let block_size = host.index.block_size();
    let blocks = host.index.depth(node);
    let mut tokens = with_capacity(blocks * block_size)?;
    let top = host.index.push_path_tokens(node, blocks, &mut tokens);
    let root = root(identity, &host.index.root(top).name, block_size);
    let records = Records::below(root, &tokens[..(blocks - count) * block_size], block_size)?;
    Ok(records.keys.last().copied().unwrap_or(root))
}

/// How many blocks at the end of a path no store has had, and the key of the block above them.
fn unsaved(host: &Host, end: NodeId) -> (usize, Option<Digest>) {
    let (mut node, mut count) = (end, 0);
    while !node.is_root() {
        for &block in host.index[node].run.blocks(host.index.block_size()).iter().rev() {
            if let Some(key) = host.stored.key(block) {
                return (count, Some(key));
            }
            count += 1;
        }
        node = host.index[node].parent;
    }
    (count, None)
}
