//! The drawing: the tree as text, and with `full` all of the pager's state, independent of the seed and of where
//! nodes happen to be split. `docs/design/rules.md` 12 fixes the form; the pure-Python reference draws the same.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::ids::{BlockId, NodeId, Token};
use crate::namespace::{self, Namespace};
use crate::pager::Pager;
use crate::sequence::{Sequence, State};

/// Levels of the tree that are indented.
const LEVELS_DRAWN: usize = 32;
/// Tokens that a line of the tree shows.
const TOKENS_SHOWN: usize = 4;

/// Draws a pager.
#[must_use]
pub fn dump(pager: &Pager, full: bool) -> String {
    let mut drawing = Drawing { pager, holders: holders(pager), text: String::new() };
    drawing.head();
    drawing.trees();
    if full {
        drawing.pool();
        drawing.sequences();
        drawing.counters();
    }
    drawing.text
}

/// How many sequences and queued copies hold each node, each once.
fn holders(pager: &Pager) -> BTreeMap<NodeId, usize> {
    let mut holders = BTreeMap::new();
    let mut count = |ends: &mut dyn Iterator<Item = NodeId>| {
        let mut seen = std::collections::BTreeSet::new();
        for end in ends {
            let mut node = end;
            while !node.is_root() && seen.insert(node) {
                *holders.entry(node).or_insert(0) += 1;
                node = pager.index[node].parent;
            }
        }
    };
    for sequence in pager.sequences.iter() {
        let extra = sequence.table.iter().filter_map(|block| pager.extra_holds.get(block)).map(|extra| extra.node);
        count(&mut std::iter::once(sequence.end).chain(extra));
    }
    for (source, _) in pager.copies.iter() {
        count(&mut pager.extra_holds.get(&source).map(|extra| extra.node).into_iter());
    }
    holders
}

struct Drawing<'a> {
    pager: &'a Pager,
    holders: BTreeMap<NodeId, usize>,
    text: String,
}

impl Drawing<'_> {
    fn line(&mut self, line: &str) {
        self.text.push_str(line);
        self.text.push('\n');
    }

    fn head(&mut self) {
        let stats = self.pager.stats();
        self.line(&format!(
            "pool: {} blocks of {} tokens: {} free, {} cached, {} active, {} reserved",
            stats.total_blocks,
            self.pager.config().block_size,
            stats.free_blocks,
            stats.cached_blocks,
            stats.active_blocks,
            stats.reserved_blocks
        ));
    }

    // ---- the tree --------------------------------------------------------------------------------------------------

    fn trees(&mut self) {
        let index = &self.pager.index;
        let mut roots: Vec<_> =
            index.roots().filter(|(id, root)| index.is_live(*id) && !root.first_child.is_none()).collect();
        roots.sort_by(|(_, a), (_, b)| a.name.cmp(&b.name));
        for (id, root) in roots {
            self.line(&format!("namespace {}", namespace_repr(&root.name)));
            self.tree(id);
        }
    }

    /// Draws what is below a root, with a stack of its own: a tree may be deeper than the machine's. Below `LEVELS_DRAWN`
    /// a line starts with its level instead of being indented, or the text would grow with the square of the depth.
    fn tree(&mut self, root: NodeId) {
        let mut open: Vec<(NodeId, String, usize, bool)> = Vec::new();
        self.open_children(root, "", 0, &mut open);
        while let Some((child, indent, level, is_last)) = open.pop() {
            let (segment, end) = self.segment(child);
            let branch = if is_last { "└─ " } else { "├─ " };
            if level < LEVELS_DRAWN {
                self.line(&format!("{indent}{branch}{segment}"));
                self.open_children(
                    end,
                    &format!("{indent}{}", if is_last { "   " } else { "│  " }),
                    level + 1,
                    &mut open,
                );
            } else {
                self.line(&format!("{level}: {branch}{segment}"));
                self.open_children(end, "", level + 1, &mut open);
            }
        }
    }

    /// Puts the children of a node on the stack, the oldest on top.
    fn open_children(&self, parent: NodeId, indent: &str, level: usize, open: &mut Vec<(NodeId, String, usize, bool)>) {
        let indent = if level < LEVELS_DRAWN { indent } else { "" };
        let children = self.children(parent).into_iter().rev().enumerate();
        open.extend(children.map(|(nth, child)| (child, indent.to_owned(), level, nth == 0)));
    }

    fn children(&self, parent: NodeId) -> Vec<NodeId> {
        let mut children = Vec::new();
        let mut next = self.pager.index.first_child(parent);
        while let Some(child) = next.some() {
            children.push(child);
            next = self.pager.index[child].younger;
        }
        children
    }

    /// What all blocks of a segment have in common.
    fn traits(&self, node: NodeId) -> (usize, u32, bool, Option<u64>) {
        let slot = self.pager.evict.slot(node);
        let holders = self.holders.get(&node).copied().unwrap_or(0);
        (holders, slot.hits(), slot.is_marked(), (holders == 0).then_some(slot.idle_since()))
    }

    /// The segment that starts with a node, and its last node.
    fn segment(&self, first: NodeId) -> (String, NodeId) {
        let (index, block_size) = (&self.pager.index, self.pager.config().block_size);
        let traits = self.traits(first);
        let mut blocks = index[first].run.blocks(block_size).to_vec();
        let mut end = first;
        while let Some(child) = index[end].first_child.some() {
            if child != index[end].last_child || self.traits(child) != traits {
                break;
            }
            blocks.extend_from_slice(index[child].run.blocks(block_size));
            end = child;
        }
        let (holders, hits, is_marked, idle_since) = traits;
        let plural = if blocks.len() == 1 { "block" } else { "blocks" };
        let mut text = format!(
            "{} {plural} {}: tokens {}; holders {holders}; hits {hits}",
            blocks.len(),
            ranges(blocks.iter().copied()),
            first_tokens(&index[first].run.tokens(block_size)[..block_size])
        );
        if is_marked {
            text.push_str("; marked");
        }
        if let Some(idle_since) = idle_since {
            let _ = write!(text, "; idle since {idle_since}");
        }
        (text, end)
    }

    // ---- the rest --------------------------------------------------------------------------------------------------

    fn pool(&mut self) {
        let pager = self.pager;
        let block_size = pager.config().block_size;
        let deepest_first = |node: NodeId| pager.index[node].run.blocks(block_size).iter().rev().copied();
        let stale = pager.evict.iter(pager.evict.stale()).flat_map(deepest_first);
        let free = ranges(pager.blocks.iter_free().chain(stale));
        self.line(&format!("free: {free}"));
        for (name, queue) in pager.evict.iter_queues() {
            let blocks = ranges(pager.evict.iter(queue).flat_map(deepest_first));
            self.line(&format!("queue {name}: {blocks}"));
        }
    }

    fn sequences(&mut self) {
        let mut sequences: Vec<&Sequence> = self.pager.sequences.iter().collect();
        sequences.sort_by_key(|sequence| sequence.serial);
        for sequence in sequences {
            let line = self.sequence(sequence);
            self.line(&line);
        }
    }

    fn sequence(&self, sequence: &Sequence) -> String {
        let pager = self.pager;
        let mut text = format!(
            "sequence {}: {}; namespace {}; cached {}; committed {}; planned {}; len {}",
            sequence.serial,
            sequence.state.name(),
            namespace_repr(pager.namespace(sequence)),
            sequence.num_cached,
            sequence.num_committed,
            pager.num_planned(sequence),
            sequence.len
        );
        if sequence.state == State::Running {
            let mut path: Vec<&[BlockId]> = Vec::new();
            let mut node = sequence.end;
            while !node.is_root() {
                path.push(pager.index[node].run.blocks(pager.config().block_size));
                node = pager.index[node].parent;
            }
            let yes_no = |yes| if yes { "yes" } else { "no" };
            let _ = write!(
                text,
                "; path {}; table {}; publishes {}; pinned {}",
                ranges(path.into_iter().rev().flatten().copied()),
                ranges(sequence.table.iter().copied()),
                yes_no(pager.may_publish(sequence)),
                yes_no(sequence.pinned)
            );
        }
        text
    }

    fn counters(&mut self) {
        let pager = self.pager;
        let copies: Vec<String> = pager.copies.iter().map(|(source, target)| format!("{source}->{target}")).collect();
        self.line(&format!("copies: {}", if copies.is_empty() { "-".to_owned() } else { copies.join(" ") }));
        self.line(&format!("clock: {}", pager.counters.clock_ticks));
        self.line(&format!("next sequence: {}", pager.sequences.next_serial()));
        let stats: Vec<String> = pager.counters.named().iter().map(|(name, value)| format!("{name}={value}")).collect();
        self.line(&format!("stats: {}", stats.join(" ")));
    }
}

/// Ids in order, ascending neighbours joined: `4-6 9 2`.
fn ranges(ids: impl Iterator<Item = BlockId>) -> String {
    let mut text = String::new();
    let mut ids = ids.peekable();
    while let Some(start) = ids.next() {
        let mut end = start;
        while ids.peek() == Some(&(end + 1)) {
            end += 1;
            ids.next();
        }
        let space = if text.is_empty() { "" } else { " " };
        let _ = if start == end { write!(text, "{space}{start}") } else { write!(text, "{space}{start}-{end}") };
    }
    if text.is_empty() { "-".to_owned() } else { text }
}

fn first_tokens(block: &[Token]) -> String {
    let shown: Vec<String> = block.iter().take(TOKENS_SHOWN).map(ToString::to_string).collect();
    let more = if block.len() > TOKENS_SHOWN { " .." } else { "" };
    shown.join(" ") + more
}

/// A namespace as Python writes what the caller gave.
#[must_use]
pub fn namespace_repr(encoded: &[u8]) -> String {
    match namespace::decode(encoded) {
        Namespace::Bytes(name) => bytes_repr(name),
        Namespace::Pairs(pairs) => {
            let comma = if pairs.len() == 1 { "," } else { "" };
            let pairs: Vec<String> = pairs
                .into_iter()
                .map(|(kind, value)| format!("('{}', {})", String::from_utf8_lossy(kind), bytes_repr(value)))
                .collect();
            format!("({}{comma})", pairs.join(", "))
        }
    }
}

fn bytes_repr(bytes: &[u8]) -> String {
    let quote = if bytes.contains(&b'\'') && !bytes.contains(&b'"') { '"' } else { '\'' };
    let mut text = format!("b{quote}");
    for &byte in bytes {
        match byte {
            b'\\' => text.push_str("\\\\"),
            b'\t' => text.push_str("\\t"),
            b'\n' => text.push_str("\\n"),
            b'\r' => text.push_str("\\r"),
            _ if char::from(byte) == quote => {
                text.push('\\');
                text.push(quote);
            }
            0x20..0x7f => text.push(char::from(byte)),
            _ => {
                let _ = write!(text, "\\x{byte:02x}");
            }
        }
    }
    text.push(quote);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_join_ascending_neighbours_only() {
        assert_eq!(ranges([4, 5, 6, 9, 2, 1].into_iter()), "4-6 9 2 1");
        assert_eq!(ranges(std::iter::empty()), "-");
    }

    #[test]
    fn namespaces_are_written_as_python_writes_them() {
        assert_eq!(namespace_repr(b"\0a'b\x00\n"), "b\"a'b\\x00\\n\"");
        assert_eq!(namespace_repr(b"\x01"), "()");
        assert_eq!(namespace_repr(b"\x01\x04\0\0\0lora\x01\0\0\0z"), "(('lora', b'z'),)");
    }
}
