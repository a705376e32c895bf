//! I3, I5, I6: the tree is a tree, whole, findable, and made of full blocks.

use super::Checker;
use crate::error::Result;
use crate::ids::{NodeId, TOKEN_END};
use crate::memory;

impl Checker<'_> {
    pub(super) fn check_tree(&mut self) -> Result<()> {
        let index = &self.pager.index;
        for (id, _) in index.nodes() {
            self.check_node(id);
        }
        if !self.violations.is_empty() {
            return Ok(());
        }
        for (id, _) in index.nodes() {
            self.check_children(id);
        }
        self.check_roots();
        self.check_reach()
    }

    fn check_node(&mut self, id: NodeId) {
        let (index, block_size) = (&self.pager.index, self.pager.config().block_size);
        let node = &index[id];
        let tokens = node.run.tokens(block_size);
        self.expect(tokens.iter().all(|&token| token < TOKEN_END), || {
            format!("I3: {id:?} has a token outside 0..2^31-1")
        });
        self.expect(node.run.len() <= node.run.capacity(), || format!("I5: {id:?} has more blocks than room"));
        if !index.is_live(id) {
            let evict = &self.pager.evict;
            let is_kept = node.is_held() || evict.slot(id).is_in_transit() || evict.num_stale() > 0;
            self.expect(is_kept, || format!("I2: dead {id:?} is neither held nor stale"));
            return;
        }
        let parent = node.parent;
        let parent_in_use = if parent.is_root() { index.root(parent).in_use() } else { index[parent].in_use() };
        self.expect(parent_in_use && index.is_live(parent), || {
            format!("I6: {id:?} is indexed but its parent {parent:?} is not")
        });
        if parent_in_use {
            let found = index.find_child(parent, &tokens[..block_size]);
            self.expect(found == Some(id), || format!("I3: {id:?} is looked for and {found:?} is found"));
        }
    }

    /// Live children hang in their parent's list, in both directions, and each says who its parent is.
    fn check_children(&mut self, id: NodeId) {
        let index = &self.pager.index;
        if !index.is_live(id) {
            return;
        }
        let last = if id.is_root() { index.root(id).last_child } else { index[id].last_child };
        let (mut older, mut next) = (NodeId::NONE, index.first_child(id));
        let mut count = 0;
        while let Some(child) = next.some() {
            let node = &index[child];
            let is_ours = node.in_use() && node.parent == id && node.older == older && index.is_live(child);
            count += 1;
            if !is_ours || count > self.pager.config().num_blocks {
                self.violations.push(format!("I6: the children of {id:?} are broken at {child:?}"));
                return;
            }
            (older, next) = (child, node.younger);
        }
        self.expect(older == last, || format!("I6: the last child of {id:?} is {older:?}, not {last:?}"));
    }

    fn check_roots(&mut self) {
        let index = &self.pager.index;
        for (id, root) in index.roots() {
            if index.is_live(id) {
                let found = index.find_root(&root.name);
                self.expect(found == Some(id), || format!("I3: namespace {id:?} is looked for and {found:?} is found"));
            }
            let children = index.nodes().filter(|(_, node)| node.parent == id).count();
            self.expect(children == root.children as usize, || {
                format!("I2: namespace {id:?} counts {} children and has {children}", root.children)
            });
            let sequences = self
                .pager
                .sequences
                .iter()
                .chain(self.pager.released_while_leaving())
                .filter(|sequence| sequence.root == id)
                .count();
            self.expect(sequences == root.pins as usize, || {
                format!("I2: namespace {id:?} counts {} sequences and has {sequences}", root.pins)
            });
            self.check_children(id);
        }
    }

    /// Every live node can be walked to from a root.
    fn check_reach(&mut self) -> Result<()> {
        let index = &self.pager.index;
        let mut stack: Vec<NodeId> = Vec::new();
        for (id, _) in index.roots().filter(|&(id, _)| index.is_live(id)) {
            memory::push(&mut stack, id)?;
        }
        let nodes = index.nodes().count();
        let mut reached = 0;
        while let Some(id) = stack.pop() {
            let mut next = index.first_child(id);
            while let Some(child) = next.some() {
                reached += 1;
                if reached > nodes {
                    self.violations.push("I6: the tree has a circle".to_owned());
                    return Ok(());
                }
                memory::push(&mut stack, child)?;
                next = index[child].younger;
            }
        }
        let live = index.nodes().filter(|&(id, _)| index.is_live(id)).count();
        self.expect(reached == live, || format!("I6: {live} nodes are indexed and {reached} can be reached"));
        Ok(())
    }
}
