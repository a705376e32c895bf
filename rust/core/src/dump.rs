//! The drawing: the tree as text, and with `full` all of the pager's state, independent of the seed and of where
//! nodes happen to be split. `docs/design/rules.md` 12 fixes the form; the pure-Python reference draws the same.
//!
//! A pool of millions of blocks may not fit into memory a second time, as text: everything that grows with the pool is
//! asked for, never assumed.

use std::fmt::{self, Write};

use crate::batch::Batch;
use crate::error::Result;
use crate::evict::Eviction;
use crate::host::Host;
use crate::ids::{BlockId, NodeId, Token};
use crate::index::{Index, Node};
use crate::memory::{self, Text, with_capacity, zeroed};
use crate::namespace::{self, Namespace};
use crate::pager::Pager;
use crate::sequence::{Sequence, State};
use crate::transfers::Work;

/// Levels of the tree that are indented; a bit each is kept of who is the last of its siblings there.
const LEVELS_DRAWN: u32 = 32;
/// Tokens that a line of the tree shows.
const TOKENS_SHOWN: usize = 4;

/// Draws a pager.
///
/// # Errors
/// `Memory` if the allocator refuses.
pub fn dump(pager: &Pager, full: bool) -> Result<String> {
    let mut text = Text::default();
    head(&mut text, pager)?;
    let block_size = pager.config().block_size;
    let (index, evict) = (&pager.index, &pager.evict);
    Forest { index, evict, block_size, holders: holders(pager)?, name: "namespace", text: &mut text }.draw()?;
    if let Some(host) = &pager.host {
        let (index, evict, holders) = (&host.index, &host.evict, host_holders(pager, host)?);
        Forest { index, evict, block_size, holders, name: "host namespace", text: &mut text }.draw()?;
    }
    if full {
        let mut drawing = Drawing { pager, text };
        drawing.pool()?;
        drawing.sequences()?;
        drawing.batches()?;
        drawing.plans()?;
        drawing.counters()?;
        text = drawing.text;
    }
    Ok(text.0)
}

/// Counts holders of nodes, each once for whatever it holds.
struct Holders {
    /// By the node's index.
    counts: Vec<u32>,
    last_seen_by: Vec<u32>,
    holder: u32,
}

impl Holders {
    fn new(index: &Index) -> Result<Self> {
        let slots = index.num_node_slots();
        Ok(Self { counts: zeroed(slots)?, last_seen_by: zeroed(slots)?, holder: 0 })
    }

    /// One holder of what ends at these nodes.
    fn count(&mut self, index: &Index, ends: impl Iterator<Item = NodeId>) {
        self.holder += 1;
        for end in ends {
            let mut node = end;
            while !node.is_root() && self.last_seen_by[node.index()] != self.holder {
                self.last_seen_by[node.index()] = self.holder;
                self.counts[node.index()] += 1;
                node = index[node].parent;
            }
        }
    }
}

/// How many sequences, queued copies and chains of plans hold each node of the device.
fn holders(pager: &Pager) -> Result<Vec<u32>> {
    let index = &pager.index;
    let mut holders = Holders::new(index)?;
    for sequence in pager.sequences.iter().chain(pager.released_while_leaving()) {
        let extra = sequence.table.iter().filter_map(|block| pager.extra_holds.get(block)).map(|extra| extra.node);
        holders.count(index, std::iter::once(device_path(sequence).0).chain(extra));
    }
    let lent = pager.batches.iter().flat_map(Batch::lent_copies).map(|copy| copy.source);
    for source in pager.copies.iter().map(|(source, _)| source).chain(lent) {
        holders.count(index, pager.extra_holds.get(&source).map(|extra| extra.node).into_iter());
    }
    for plan in pager.plans.iter() {
        if let Work::Offload { chains } = &plan.work {
            for chain in chains {
                holders.count(index, std::iter::once(chain.end));
            }
        }
    }
    Ok(holders.counts)
}

/// The same for the host: swapped sequences, fetches, and chains, which hold the block above them.
fn host_holders(pager: &Pager, host: &Host) -> Result<Vec<u32>> {
    let index = &host.index;
    let mut holders = Holders::new(index)?;
    for away in pager.aways() {
        holders.count(index, away.end.into_iter());
    }
    for plan in pager.plans.iter() {
        match &plan.work {
            Work::Offload { chains } => {
                for chain in chains {
                    holders.count(index, chain.above.into_iter());
                }
            }
            Work::Fetch { source, .. } => holders.count(index, source.iter().copied()),
            _ => {}
        }
    }
    Ok(holders.counts)
}

/// The end of what a sequence holds of the device's index, and how many blocks that are.
fn device_path(sequence: &Sequence) -> (NodeId, usize) {
    let back = sequence.away.as_ref().and_then(|away| away.back);
    back.unwrap_or((sequence.end, sequence.path_blocks))
}

fn head(text: &mut Text, pager: &Pager) -> Result<()> {
    let stats = pager.stats();
    write!(
        text,
        "pool: {} blocks of {} tokens: {} free, {} cached, {} active, {} reserved",
        stats.total_blocks,
        pager.config().block_size,
        stats.free_blocks,
        stats.cached_blocks,
        stats.active_blocks,
        stats.reserved_blocks
    )?;
    write_moving(text, stats.writing_blocks, stats.quarantined_blocks)?;
    if pager.host.is_some() {
        let host = stats.host;
        write!(
            text,
            "host: {} blocks: {} free, {} cached, {} active",
            host.total_blocks, host.free_blocks, host.cached_blocks, host.active_blocks
        )?;
        write_moving(text, host.writing_blocks, host.quarantined_blocks)?;
    }
    Ok(())
}

fn write_moving(text: &mut Text, writing: usize, quarantined: usize) -> fmt::Result {
    for (count, state) in [(writing, "writing"), (quarantined, "quarantined")] {
        if count > 0 {
            write!(text, ", {count} {state}")?;
        }
    }
    text.write_str("\n")
}

/// The trees of one tier.
struct Forest<'a> {
    index: &'a Index,
    evict: &'a Eviction,
    block_size: usize,
    holders: Vec<u32>,
    name: &'static str,
    text: &'a mut Text,
}

/// A segment that is to be drawn: its first node, its level, whether it is the last of its siblings, and for each
/// level above whether there nothing more is to come.
struct Branch {
    first: NodeId,
    level: u32,
    is_last: bool,
    ended: u32,
}

impl Forest<'_> {
    fn draw(&mut self) -> Result<()> {
        let index = self.index;
        let mut roots = Vec::new();
        for (id, root) in index.roots().filter(|(id, root)| index.is_live(*id) && !root.first_child.is_none()) {
            memory::push(&mut roots, (id, root))?;
        }
        roots.sort_unstable_by(|(_, a), (_, b)| a.name.cmp(&b.name));
        for (id, root) in roots {
            write!(self.text, "{} ", self.name)?;
            write_namespace(self.text, &root.name)?;
            self.text.write_str("\n")?;
            self.tree(id)?;
        }
        Ok(())
    }

    /// Draws what is below a root, with a stack of its own: a tree may be deeper than the machine's. Below `LEVELS_DRAWN`
    /// a line starts with its level instead of being indented, or the text would grow with the square of the depth.
    fn tree(&mut self, root: NodeId) -> Result<()> {
        let mut open: Vec<Branch> = Vec::new();
        self.open_children(root, 0, 0, &mut open)?;
        while let Some(Branch { first, level, is_last, ended }) = open.pop() {
            if level < LEVELS_DRAWN {
                for above in 0..level {
                    self.text.write_str(if ended >> above & 1 == 1 { "   " } else { "│  " })?;
                }
            } else {
                write!(self.text, "{level}: ")?;
            }
            self.text.write_str(if is_last { "└─ " } else { "├─ " })?;
            let end = self.segment(first)?;
            let ended = if level < LEVELS_DRAWN { ended | u32::from(is_last) << level } else { 0 };
            self.open_children(end, level + 1, ended, &mut open)?;
        }
        Ok(())
    }

    /// Puts the children of a node on the stack, the oldest on top.
    fn open_children(&self, parent: NodeId, level: u32, ended: u32, open: &mut Vec<Branch>) -> Result<()> {
        let mut next = self.index.last_child(parent);
        let mut is_last = true;
        while let Some(first) = next.some() {
            memory::push(open, Branch { first, level, is_last, ended })?;
            is_last = false;
            next = self.index[first].older;
        }
        Ok(())
    }

    /// What all blocks of a segment have in common.
    fn traits(&self, node: NodeId) -> (u32, u32, bool, Option<u64>) {
        let slot = self.evict.slot(node);
        let holders = self.holders[node.index()];
        (holders, slot.hits(), slot.is_marked(), slot.is_queued().then_some(slot.idle_since()))
    }

    /// The node that goes on with a node's segment.
    fn next_in_segment(&self, id: NodeId) -> Option<NodeId> {
        let Node { first_child, last_child, .. } = self.index[id];
        let child = first_child.some()?;
        (child == last_child && self.traits(child) == self.traits(id)).then_some(child)
    }

    /// Draws the segment that starts with a node; answers its last node.
    fn segment(&mut self, first: NodeId) -> Result<NodeId> {
        let (index, block_size) = (self.index, self.block_size);
        let (mut end, mut len) = (first, index[first].run.len());
        while let Some(child) = self.next_in_segment(end) {
            end = child;
            len += index[child].run.len();
        }
        write!(self.text, "{len} {} ", if len == 1 { "block" } else { "blocks" })?;
        // Up to its end a segment is nothing but first children.
        let nodes = std::iter::successors(Some(first), |&id| (id != end).then(|| index[id].first_child));
        write_ranges(self.text, nodes.flat_map(|id| index[id].run.blocks(block_size).iter().copied()))?;
        self.text.write_str(": tokens ")?;
        write_first_tokens(self.text, &index[first].run.tokens(block_size)[..block_size])?;
        let (holders, hits, is_marked, idle_since) = self.traits(first);
        write!(self.text, "; holders {holders}; hits {hits}")?;
        if is_marked {
            self.text.write_str("; marked")?;
        }
        if let Some(idle_since) = idle_since {
            write!(self.text, "; idle since {idle_since}")?;
        }
        self.text.write_str("\n")?;
        Ok(end)
    }
}

struct Drawing<'a> {
    pager: &'a Pager,
    text: Text,
}

impl<'a> Drawing<'a> {
    fn pool(&mut self) -> Result<()> {
        let pager = self.pager;
        let block_size = pager.config().block_size;
        let deepest_first = |node: NodeId| pager.index[node].run.blocks(block_size).iter().rev().copied();
        let stale = pager.evict.iter(pager.evict.stale()).flat_map(deepest_first);
        self.text.write_str("free: ")?;
        write_ranges(&mut self.text, pager.blocks.iter_free().chain(stale))?;
        if let Some(host) = &pager.host {
            let deepest_first = |node: NodeId| host.index[node].run.blocks(block_size).iter().rev().copied();
            let stale = host.evict.iter(host.evict.stale()).flat_map(deepest_first);
            self.text.write_str("\nhost free: ")?;
            write_ranges(&mut self.text, host.blocks.iter_free().chain(stale))?;
        }
        for (name, queue) in pager.evict.iter_queues() {
            write!(self.text, "\nqueue {name}: ")?;
            write_ranges(&mut self.text, pager.evict.iter(queue).flat_map(deepest_first))?;
        }
        if let Some(host) = &pager.host {
            let deepest_first = |node: NodeId| host.index[node].run.blocks(block_size).iter().rev().copied();
            for (name, queue) in host.evict.iter_queues() {
                write!(self.text, "\nhost queue {name}: ")?;
                write_ranges(&mut self.text, host.evict.iter(queue).flat_map(deepest_first))?;
            }
            self.text.write_str("\nfenced: ")?;
            let fenced = self.fenced()?;
            write_ranges(&mut self.text, fenced.into_iter())?;
        }
        Ok(self.text.write_str("\n")?)
    }

    /// Fenced blocks, free and cached, ascending.
    fn fenced(&self) -> Result<Vec<BlockId>> {
        let pager = self.pager;
        let mut fenced = Vec::new();
        for block in pager.fences.blocks() {
            memory::push(&mut fenced, block)?;
        }
        for node in pager.fences.nodes().filter(|&node| !pager.evict.slot(node).is_in_transit()) {
            for &block in pager.index[node].run.blocks(pager.config().block_size) {
                memory::push(&mut fenced, block)?;
            }
        }
        fenced.sort_unstable();
        Ok(fenced)
    }

    fn plans(&mut self) -> Result<()> {
        for plan in self.pager.plans.in_order()? {
            write!(self.text, "plan {}.{}: {}; ", plan.id.number, plan.id.generation, plan.work.name())?;
            self.text.write_str(plan.state.name())?;
            if let Some(tick) = plan.state.tick() {
                write!(self.text, " at {tick}")?;
            }
            self.text.write_str(";")?;
            for (source, target) in plan.sources.iter().zip(&plan.targets) {
                write!(self.text, " {source}->{target}")?;
            }
            self.text.write_str(if plan.sources.is_empty() { " -\n" } else { "\n" })?;
        }
        Ok(())
    }

    fn sequences(&mut self) -> Result<()> {
        let mut sequences: Vec<&Sequence> = with_capacity(self.pager.sequences.iter().count())?;
        sequences.extend(self.pager.sequences.iter());
        sequences.sort_unstable_by_key(|sequence| sequence.serial);
        for sequence in sequences {
            self.sequence(sequence)?;
        }
        Ok(())
    }

    fn batches(&mut self) -> Result<()> {
        for handle in self.pager.batches.handles() {
            let Some(batch) = self.pager.batches.get(handle) else { continue };
            write!(self.text, "batch {}: rows", handle.serial)?;
            for sequence in &batch.sequences {
                match sequence {
                    Some(sequence) => write!(self.text, " {}", sequence.serial)?,
                    None => self.text.write_str(" -")?,
                }
            }
            if batch.sequences.is_empty() {
                self.text.write_str(" -")?;
            }
            self.text.write_str("; open")?;
            for step in batch.oldest..batch.next {
                write!(self.text, " {step}")?;
            }
            if batch.num_open() == 0 {
                self.text.write_str(" -")?;
            }
            writeln!(self.text, "; next step {}", batch.next)?;
        }
        Ok(())
    }

    fn sequence(&mut self, sequence: &'a Sequence) -> Result<()> {
        let pager = self.pager;
        write!(self.text, "sequence {}: {}; namespace ", sequence.serial, sequence.state.name())?;
        write_namespace(&mut self.text, pager.namespace(sequence))?;
        write!(
            self.text,
            "; cached {}; committed {}; planned {}; len {}",
            sequence.num_cached,
            sequence.num_committed,
            pager.num_planned(sequence),
            sequence.len
        )?;
        if sequence.state.is_on_device() {
            let mut path: Vec<&[BlockId]> = Vec::new();
            let mut node = device_path(sequence).0;
            while !node.is_root() {
                memory::push(&mut path, pager.index[node].run.blocks(pager.config().block_size))?;
                node = pager.index[node].parent;
            }
            let yes_no = |yes| if yes { "yes" } else { "no" };
            self.text.write_str("; path ")?;
            write_ranges(&mut self.text, path.into_iter().rev().flatten().copied())?;
            self.text.write_str("; table ")?;
            write_ranges(&mut self.text, sequence.table.iter().copied())?;
            let publishes = yes_no(pager.may_publish(sequence));
            write!(self.text, "; publishes {publishes}; pinned {}", yes_no(sequence.pinned))?;
            if sequence.announced.is_some() {
                self.text.write_str("; computing")?;
            }
        }
        if let (Some(away), Some(host)) = (&sequence.away, &pager.host) {
            let mut path = with_capacity(away.path_blocks)?;
            if let Some(end) = away.end {
                host.index.push_path_blocks(end, away.path_blocks, 0, &mut path);
            }
            self.text.write_str("; host path ")?;
            write_ranges(&mut self.text, path.into_iter())?;
            if sequence.state != State::SwappingOut {
                self.text.write_str("; host own ")?;
                write_ranges(&mut self.text, away.own.iter().copied())?;
            }
        }
        Ok(self.text.write_str("\n")?)
    }

    fn counters(&mut self) -> fmt::Result {
        let pager = self.pager;
        self.text.write_str("copies:")?;
        for (source, target) in pager.copies.iter() {
            write!(self.text, " {source}->{target}")?;
        }
        self.text.write_str(if pager.copies.is_empty() { " -\n" } else { "\n" })?;
        writeln!(self.text, "clock: {}", pager.counters.clock_ticks)?;
        writeln!(self.text, "next sequence: {}", pager.sequences.next_serial())?;
        self.text.write_str("stats:")?;
        for (name, value) in pager.counters.named() {
            write!(self.text, " {name}={value}")?;
        }
        if let Some(host) = &pager.host {
            let counters = &pager.counters;
            write!(
                self.text,
                "\ntransfers: host_evicted_blocks={} offloaded_blocks={} fetched_blocks={} swap_outs={} swap_ins={}",
                host.num_evicted,
                counters.offloaded_blocks,
                counters.fetched_blocks,
                counters.swap_outs,
                counters.swap_ins
            )?;
        }
        self.text.write_str("\n")
    }
}

/// Ids in order, ascending neighbours joined: `4-6 9 2`.
fn write_ranges(text: &mut impl Write, ids: impl Iterator<Item = BlockId>) -> fmt::Result {
    let mut ids = ids.peekable();
    if ids.peek().is_none() {
        return text.write_str("-");
    }
    let mut space = "";
    while let Some(start) = ids.next() {
        let mut end = start;
        while ids.peek() == Some(&(end + 1)) {
            end += 1;
            ids.next();
        }
        write!(text, "{space}{start}")?;
        if start != end {
            write!(text, "-{end}")?;
        }
        space = " ";
    }
    Ok(())
}

fn write_first_tokens(text: &mut impl Write, block: &[Token]) -> fmt::Result {
    let mut space = "";
    for token in block.iter().take(TOKENS_SHOWN) {
        write!(text, "{space}{token}")?;
        space = " ";
    }
    text.write_str(if block.len() > TOKENS_SHOWN { " .." } else { "" })
}

/// A namespace as Python writes what the caller gave.
fn write_namespace(text: &mut impl Write, encoded: &[u8]) -> fmt::Result {
    match namespace::decode(encoded) {
        Namespace::Bytes(name) => write_bytes(text, name),
        Namespace::Pairs(pairs) => {
            let mut start = "(";
            for (kind, value) in pairs.clone() {
                write!(text, "{start}('{}', ", kind.escape_ascii())?;
                write_bytes(text, value)?;
                text.write_str(")")?;
                start = ", ";
            }
            text.write_str(match pairs.count() {
                0 => "()",
                1 => ",)",
                _ => ")",
            })
        }
    }
}

fn write_bytes(text: &mut impl Write, bytes: &[u8]) -> fmt::Result {
    let quote = if bytes.contains(&b'\'') && !bytes.contains(&b'"') { '"' } else { '\'' };
    write!(text, "b{quote}")?;
    for &byte in bytes {
        match byte {
            b'\\' => text.write_str("\\\\")?,
            b'\t' => text.write_str("\\t")?,
            b'\n' => text.write_str("\\n")?,
            b'\r' => text.write_str("\\r")?,
            _ if char::from(byte) == quote => write!(text, "\\{quote}")?,
            0x20..0x7f => text.write_char(char::from(byte))?,
            _ => write!(text, "\\x{byte:02x}")?,
        }
    }
    text.write_char(quote)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(write: impl FnOnce(&mut String) -> fmt::Result) -> String {
        let mut text = String::new();
        write(&mut text).unwrap();
        text
    }

    #[test]
    fn ranges_join_ascending_neighbours_only() {
        let ranges = |ids: &[BlockId]| written(|text| write_ranges(text, ids.iter().copied()));
        assert_eq!(ranges(&[4, 5, 6, 9, 2, 1]), "4-6 9 2 1");
        assert_eq!(ranges(&[]), "-");
    }

    #[test]
    fn namespaces_are_written_as_python_writes_them() {
        let repr = |encoded: &[u8]| written(|text| write_namespace(text, encoded));
        assert_eq!(repr(b"\0a'b\x00\n"), "b\"a'b\\x00\\n\"");
        assert_eq!(repr(b"\x01"), "()");
        assert_eq!(repr(b"\x01\x04\0\0\0lora\x01\0\0\0z"), "(('lora', b'z'),)");
        assert_eq!(repr(b"\x01\x01\0\0\0a\0\0\0\0\x01\0\0\0b\0\0\0\0"), "(('a', b''), ('b', b''))");
    }
}
