//! Invalidation: reset and forget.

use super::Pager;
use super::admit::check_tokens;
use crate::config::check_identity;
use crate::error::{Error, Result};
use crate::ids::{NodeId, Token};
use crate::memory::with_capacity;

impl Pager {
    /// Nothing indexed so far can hit again. Costs the same for every pool: the index starts a new epoch, and what
    /// was cached waits, as free blocks, until a frame is needed.
    ///
    /// # Errors
    /// `Config` for an identity that is too long; `Value` after 2^32 - 2 resets.
    pub fn reset(&mut self, identity: Option<Vec<u8>>) -> Result<()> {
        if let Some(identity) = &identity {
            check_identity(identity)?;
        }
        self.index.start_epoch()?;
        self.plans.forget_loads(None);
        if let Some(identity) = identity {
            self.config.identity = identity;
        }
        // What a plan reads does not become free yet.
        for node in self.in_transit.nodes() {
            self.evict.dequeue(node, self.index[node].run.len());
            self.fences.clear_node(node);
        }
        self.evict.retire();
        if let Some(host) = &mut self.host {
            host.reset()?;
        }
        Ok(())
    }

    /// Drops the last block of an indexed path and all below it from the index of each tier that has the path; answers
    /// how many blocks those were. Cached ones become free; held ones stay with their holders.
    ///
    /// # Errors
    /// `Value` unless `tokens` are a whole number of blocks, at least one; `Token`; `Memory`.
    pub fn forget(&mut self, tokens: &[Token], namespace: &[u8]) -> Result<usize> {
        let block_size = self.config.block_size;
        check_tokens(tokens, 0)?;
        if tokens.is_empty() || !tokens.len().is_multiple_of(block_size) {
            return Err(Error::Value(format!(
                "forget takes a whole number of blocks of {block_size} tokens, at least one; got {} tokens",
                tokens.len()
            )));
        }
        let blocks = tokens.len() / block_size;
        let on_host = self.host.as_ref().and_then(|host| host.index.find_path(namespace, tokens, blocks));
        let on_device = self.index.find_path(namespace, tokens, blocks);
        // The last block, and what is below it, keeps the node's id. Splits do not show.
        if let (Some(host), Some(found)) = (&mut self.host, on_host) {
            host.cut_above(found)?;
        }
        if let Some(found) = on_device
            && found.within > 1
        {
            self.split(found.node, found.within - 1)?;
        }
        let mut dropped = on_device.map_or(Ok(0), |found| self.drop_subtree(found.node))?;
        self.plans.forget_loads(Some((namespace, tokens)));
        if let (Some(host), Some(found)) = (&mut self.host, on_host) {
            dropped += host.drop_subtree(found.node);
        }
        Ok(dropped)
    }

    /// Takes a node and all below it out of the index, children before parents, siblings by creation. No recursion (I13).
    fn drop_subtree(&mut self, top: NodeId) -> Result<usize> {
        // The list gets its room before anything changes (I7).
        let first = self.index.deepest_first(top);
        let nodes = std::iter::successors(Some(first), |&node| self.index.next_in_subtree(node, top));
        let mut idle = with_capacity(nodes.filter(|&node| !self.index[node].is_held()).count())?;

        let mut dropped = 0;
        self.index.unlink_sibling(top);
        let mut next = Some(first);
        while let Some(node) = next {
            let blocks = self.index[node].run.len();
            dropped += blocks;
            self.index.forget(node);
            if !self.index[node].is_held() {
                self.evict.dequeue(node, blocks);
                self.fences.clear_node(node);
                if !self.evict.slot(node).is_in_transit() {
                    idle.push(node);
                }
            }
            next = self.index.next_in_subtree(node, top);
        }
        // Only now: a withdrawn copy may let go of other nodes of this tree.
        for node in idle {
            self.free_node(node);
        }
        Ok(dropped)
    }
}
