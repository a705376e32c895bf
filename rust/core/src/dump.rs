//! The drawing: the tree as text, and with `full` all of the pager's state, independent of the seed and of where
//! nodes happen to be split. `docs/design/rules.md` 12 fixes the form; the pure-Python reference draws the same.
//!
//! A pool of millions of blocks may not fit into memory a second time, as text: everything that grows with the pool is
//! asked for, never assumed.

use std::fmt::{self, Write};

use crate::batch::Batch;
use crate::error::Result;
use crate::ids::{BlockId, NodeId, Token};
use crate::index::Node;
use crate::memory::{self, Text, with_capacity, zeroed};
use crate::namespace::{self, Namespace};
use crate::pager::Pager;
use crate::sequence::{Sequence, State};

/// Levels of the tree that are indented; a bit each is kept of who is the last of its siblings there.
const LEVELS_DRAWN: u32 = 32;
/// Tokens that a line of the tree shows.
const TOKENS_SHOWN: usize = 4;

/// Draws a pager.
///
/// # Errors
/// `Memory` if the allocator refuses.
pub fn dump(pager: &Pager, full: bool) -> Result<String> {
    let mut drawing = Drawing { pager, holders: holders(pager)?, text: Text::default() };
    drawing.head()?;
    drawing.trees()?;
    if full {
        drawing.pool()?;
        drawing.sequences()?;
        drawing.batches()?;
        drawing.counters()?;
    }
    Ok(drawing.text.0)
}

/// How many sequences and queued copies hold each node, each once: by the node's index.
fn holders(pager: &Pager) -> Result<Vec<u32>> {
    let slots = pager.index.num_node_slots();
    let (mut holders, mut last_seen_by) = (zeroed(slots)?, zeroed(slots)?);
    let mut holder = 0;
    let mut count = |ends: &mut dyn Iterator<Item = NodeId>| {
        holder += 1;
        for end in ends {
            let mut node = end;
            while !node.is_root() && last_seen_by[node.index()] != holder {
                last_seen_by[node.index()] = holder;
                holders[node.index()] += 1;
                node = pager.index[node].parent;
            }
        }
    };
    for sequence in pager.sequences.iter() {
        let extra = sequence.table.iter().filter_map(|block| pager.extra_holds.get(block)).map(|extra| extra.node);
        count(&mut std::iter::once(sequence.end).chain(extra));
    }
    let lent = pager.batches.iter().flat_map(Batch::lent_copies).map(|copy| copy.source);
    for source in pager.copies.iter().map(|(source, _)| source).chain(lent) {
        count(&mut pager.extra_holds.get(&source).map(|extra| extra.node).into_iter());
    }
    Ok(holders)
}

struct Drawing<'a> {
    pager: &'a Pager,
    holders: Vec<u32>,
    text: Text,
}

/// A segment that is to be drawn: its first node, its level, whether it is the last of its siblings, and for each
/// level above whether there nothing more is to come.
struct Branch {
    first: NodeId,
    level: u32,
    is_last: bool,
    ended: u32,
}

impl<'a> Drawing<'a> {
    fn head(&mut self) -> fmt::Result {
        let stats = self.pager.stats();
        writeln!(
            self.text,
            "pool: {} blocks of {} tokens: {} free, {} cached, {} active, {} reserved",
            stats.total_blocks,
            self.pager.config().block_size,
            stats.free_blocks,
            stats.cached_blocks,
            stats.active_blocks,
            stats.reserved_blocks
        )
    }

    // ---- the tree --------------------------------------------------------------------------------------------------

    fn trees(&mut self) -> Result<()> {
        let index = &self.pager.index;
        let mut roots = Vec::new();
        for (id, root) in index.roots().filter(|(id, root)| index.is_live(*id) && !root.first_child.is_none()) {
            memory::push(&mut roots, (id, root))?;
        }
        roots.sort_unstable_by(|(_, a), (_, b)| a.name.cmp(&b.name));
        for (id, root) in roots {
            self.text.write_str("namespace ")?;
            write_namespace(&mut self.text, &root.name)?;
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
        let mut next = self.pager.index.last_child(parent);
        let mut is_last = true;
        while let Some(first) = next.some() {
            memory::push(open, Branch { first, level, is_last, ended })?;
            is_last = false;
            next = self.pager.index[first].older;
        }
        Ok(())
    }

    /// What all blocks of a segment have in common.
    fn traits(&self, node: NodeId) -> (u32, u32, bool, Option<u64>) {
        let slot = self.pager.evict.slot(node);
        let holders = self.holders[node.index()];
        (holders, slot.hits(), slot.is_marked(), (holders == 0).then_some(slot.idle_since()))
    }

    /// The node that goes on with a node's segment.
    fn next_in_segment(&self, id: NodeId) -> Option<NodeId> {
        let Node { first_child, last_child, .. } = self.pager.index[id];
        let child = first_child.some()?;
        (child == last_child && self.traits(child) == self.traits(id)).then_some(child)
    }

    /// Draws the segment that starts with a node; answers its last node.
    fn segment(&mut self, first: NodeId) -> Result<NodeId> {
        let (pager, block_size) = (self.pager, self.pager.config().block_size);
        let (mut end, mut len) = (first, pager.index[first].run.len());
        while let Some(child) = self.next_in_segment(end) {
            end = child;
            len += pager.index[child].run.len();
        }
        write!(self.text, "{len} {} ", if len == 1 { "block" } else { "blocks" })?;
        // Up to its end a segment is nothing but first children.
        let nodes = std::iter::successors(Some(first), |&id| (id != end).then(|| pager.index[id].first_child));
        write_ranges(&mut self.text, nodes.flat_map(|id| pager.index[id].run.blocks(block_size).iter().copied()))?;
        self.text.write_str(": tokens ")?;
        write_first_tokens(&mut self.text, &pager.index[first].run.tokens(block_size)[..block_size])?;
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

    // ---- the rest --------------------------------------------------------------------------------------------------

    fn pool(&mut self) -> fmt::Result {
        let pager = self.pager;
        let block_size = pager.config().block_size;
        let deepest_first = |node: NodeId| pager.index[node].run.blocks(block_size).iter().rev().copied();
        let stale = pager.evict.iter(pager.evict.stale()).flat_map(deepest_first);
        self.text.write_str("free: ")?;
        write_ranges(&mut self.text, pager.blocks.iter_free().chain(stale))?;
        for (name, queue) in pager.evict.iter_queues() {
            write!(self.text, "\nqueue {name}: ")?;
            write_ranges(&mut self.text, pager.evict.iter(queue).flat_map(deepest_first))?;
        }
        self.text.write_str("\n")
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
        if sequence.state == State::Running {
            let mut path: Vec<&[BlockId]> = Vec::new();
            let mut node = sequence.end;
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
