//! What the pager keeps of a sequence.

use crate::admission::Life;
use crate::batch::Seat;
use crate::host::Away;
use crate::ids::{BlockId, NodeId, PlanId};
use crate::tail::Tail;

/// May it be stepped?
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// It holds blocks.
    Running,
    /// It holds its tokens only.
    Preempted,
    /// It holds blocks, and a plan fills some of them.
    Fetching,
    /// It holds blocks, and a plan copies them to the host.
    SwappingOut,
    /// It holds blocks of the host.
    Swapped,
    /// It holds blocks of both tiers, and a plan brings it back.
    SwappingIn,
}

impl State {
    /// The word for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Preempted => "preempted",
            Self::Fetching => "fetching",
            Self::SwappingOut => "swapping_out",
            Self::Swapped => "swapped",
            Self::SwappingIn => "swapping_in",
        }
    }

    /// Does it hold blocks of the device?
    #[must_use]
    pub const fn is_on_device(self) -> bool {
        !matches!(self, Self::Preempted | Self::Swapped)
    }
}

/// One running or preempted sequence.
///
/// Its tokens are split in two: those of `path_blocks` blocks lie in the tree, between `root` and `end`; the rest in
/// `tail`. The fields are in this order in memory: what steps of a batch need of it is one cache line's worth, and what
/// only load control and transfers ask for comes last.
#[derive(Debug)]
#[repr(C)]
pub struct Sequence {
    /// Its number.
    pub serial: u64,
    /// Logical block -> physical block. It may lack the last token's block and have blocks beyond it.
    pub table: Vec<BlockId>,
    /// Its namespace.
    pub root: NodeId,
    /// The node at the end of its path, pinned once by it; the root for an empty path.
    pub end: NodeId,
    /// Blocks of its path.
    pub path_blocks: usize,
    /// First table position whose block is not the path's although the path covers it (a duplicate); none:
    /// `usize::MAX`.
    pub first_duplicate: usize,
    /// Its slot in the slab.
    pub slot: u32,
    /// May it be stepped?
    pub state: State,
    /// Does it only hold a prefix (`pin=True`)?
    pub pinned: bool,
    /// Has the tail ever had a content token?
    pub has_content: bool,
    /// Part of its path was forgotten, and cut off since: it publishes nothing more.
    pub is_silent: bool,
    /// Tokens, placeholders included.
    pub len: usize,
    /// KV written.
    pub num_committed: usize,
    /// Tokens after the path.
    pub tail: Tail,
    /// Its row in a batch.
    pub seat: Seat,
    /// What it has announced: the end of its path, and the hash of the block behind it.
    pub announced: Option<(NodeId, u32)>,
    /// Found cached at admission.
    pub num_cached: u32,
    /// `num_committed` when it was preempted.
    pub lost_tokens: u32,
    /// How often it gave its blocks back to come back later, and who it was forked from before that.
    pub num_preemptions: u32,
    /// The plan that it waits for.
    pub plan: Option<PlanId>,
    /// What is said of how long it runs.
    pub life: Life,
    /// When it came back: the number of the next new sequence then, and of this return; (0, 0): never.
    pub back: (u64, u64),
    /// What it has on the host.
    pub away: Option<Box<Away>>,
}

impl Sequence {
    /// No table entry is a duplicate of the path's.
    pub const NO_DUPLICATE: usize = usize::MAX;

    /// When it came in, or came back: later ones are greater.
    #[must_use]
    pub const fn entry(&self) -> (u64, u64) {
        if self.back.1 > 0 { self.back } else { (self.serial + 1, 0) }
    }
}
