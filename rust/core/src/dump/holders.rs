//! Who holds what, counted for the drawing: each holder once for each node, whatever it holds of it.

use super::device_path;
use crate::batch::Batch;
use crate::error::Result;
use crate::host::Host;
use crate::ids::NodeId;
use crate::index::Index;
use crate::memory::zeroed;
use crate::pager::Pager;
use crate::transfers::Work;

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
pub(super) fn holders_of_device(pager: &Pager) -> Result<Vec<u32>> {
    let index = &pager.index;
    let mut holders = Holders::new(index)?;
    for sequence in pager.sequences.iter().chain(pager.released_while_leaving()) {
        let extra = sequence.table.iter().filter_map(|block| pager.extra_holds.get(block)).map(|extra| extra.node);
        holders.count(index, std::iter::once(device_path(sequence)).chain(extra));
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
pub(super) fn holders_of_host(pager: &Pager, host: &Host) -> Result<Vec<u32>> {
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
            Work::Load(load) => holders.count(index, load.above.into_iter()),
            Work::Save { chains, .. } => {
                for &(end, _) in chains {
                    holders.count(index, std::iter::once(end));
                }
            }
            _ => {}
        }
    }
    Ok(holders.counts)
}
