//! The drawing: the tree as text, and with `full` all of the pager's state, independent of the seed and of where
//! nodes happen to be split. `docs/design/rules.md` 12 fixes the form; the pure-Python reference draws the same.
//!
//! A pool of millions of blocks may not fit into memory a second time, as text: everything that grows with the pool is
//! asked for, never assumed.

mod forest;
mod holders;
mod words;

use std::fmt::{self, Write};

use self::forest::Forest;
use self::holders::{holders_of_device, holders_of_host};
use self::words::{write_namespace, write_ranges};
use crate::error::Result;
use crate::host::Host;
use crate::ids::{BlockId, NodeId};
use crate::memory::{self, Text, with_capacity};
use crate::pager::Pager;
use crate::sequence::{Sequence, State};

/// Draws a pager.
///
/// # Errors
/// `Memory` if the allocator refuses.
pub fn dump(pager: &Pager, full: bool) -> Result<String> {
    let mut text = Text::default();
    head(&mut text, pager)?;
    let block_size = pager.config().block_size;
    let (index, evict) = (&pager.index, &pager.evict);
    Forest { index, evict, block_size, holders: holders_of_device(pager)?, name: "namespace", text: &mut text }
        .draw()?;
    if let Some(host) = &pager.host {
        let (index, evict, holders) = (&host.index, &host.evict, holders_of_host(pager, host)?);
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

/// The end of what a sequence holds of the device's index.
fn device_path(sequence: &Sequence) -> NodeId {
    sequence.away.as_ref().and_then(|away| away.back).map_or(sequence.end, |(end, _)| end)
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
            self.text.write_str("\nhost stored: ")?;
            let stored = self.stored(host)?;
            write_ranges(&mut self.text, stored.into_iter())?;
            self.text.write_str("\nfenced: ")?;
            let fenced = self.fenced()?;
            write_ranges(&mut self.text, fenced.into_iter())?;
        }
        Ok(self.text.write_str("\n")?)
    }

    /// Indexed host blocks that a store has, ascending.
    fn stored(&self, host: &Host) -> Result<Vec<BlockId>> {
        let mut stored = Vec::new();
        for (_, node) in host.index.nodes().filter(|&(id, _)| host.index.is_live(id)) {
            for &block in node.run.blocks(self.pager.config().block_size) {
                if host.stored.is_stored(block) {
                    memory::push(&mut stored, block)?;
                }
            }
        }
        stored.sort_unstable();
        Ok(stored)
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
        if sequence.num_preemptions > 0 {
            write!(self.text, "; preempted {}", sequence.num_preemptions)?;
        }
        if sequence.back.1 > 0 {
            write!(self.text, "; back {}.{}", sequence.back.0, sequence.back.1)?;
        }
        if sequence.state.is_on_device() {
            let end = device_path(sequence);
            let blocks = pager.index.depth(end);
            let mut path = with_capacity(blocks)?;
            pager.index.push_path_blocks(end, blocks, 0, &mut path);
            let yes_no = |yes| if yes { "yes" } else { "no" };
            self.text.write_str("; path ")?;
            write_ranges(&mut self.text, path.into_iter())?;
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
                "\ntransfers: host_evicted_blocks={} offloaded_blocks={} fetched_blocks={} swap_outs={} swap_ins={} \
                 saved_blocks={} loaded_blocks={}",
                host.num_evicted,
                counters.offloaded_blocks,
                counters.fetched_blocks,
                counters.swap_outs,
                counters.swap_ins,
                counters.saved_blocks,
                counters.loaded_blocks
            )?;
        }
        self.text.write_str("\n")
    }
}
