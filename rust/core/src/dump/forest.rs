//! The trees of a tier, a line for each segment.

use std::fmt::Write;

use super::words::{write_first_tokens, write_namespace, write_ranges};
use crate::error::Result;
use crate::evict::Eviction;
use crate::ids::NodeId;
use crate::index::{Index, Node};
use crate::memory::{self, Text};

/// Levels of the tree that are indented; a bit each is kept of who is the last of its siblings there.
const LEVELS_DRAWN: u32 = 32;

/// The trees of one tier.
pub(super) struct Forest<'a> {
    pub index: &'a Index,
    pub evict: &'a Eviction,
    pub block_size: usize,
    pub holders: Vec<u32>,
    pub name: &'static str,
    pub text: &'a mut Text,
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
    pub fn draw(&mut self) -> Result<()> {
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
