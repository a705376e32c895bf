//! Names of things: `u32` indices, each with its own type where mixing two of them could go unnoticed.

/// A block's id: its index in the pool, below 2^31. A plain `u32`, because tables and runs hold millions of them next
/// to tokens.
pub type BlockId = u32;

/// A token's value, 0 to 2^31-1.
pub type Token = u32;

/// The first value that a token may not have.
pub const TOKEN_END: Token = 1 << 31;

/// Values from here on stand for content that is no text (an image, say): see `content`.
pub const CONTENT_START: Token = 1 << 30;

/// Where blocks are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tier {
    /// Where kernels read them.
    Device,
    /// In the host's memory.
    Host,
    /// Outside: a store knows blocks by keys.
    Store,
}

impl Tier {
    /// The word for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Host => "host",
            Self::Store => "store",
        }
    }
}

/// Names a plan.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PlanId {
    /// Its number, while it has not ended.
    pub number: u32,
    /// How many plans had that number before.
    pub generation: u32,
}

/// A node of the prefix tree, or the root of a namespace: the high bit tells which.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NodeId(u32);

impl NodeId {
    /// No node.
    pub const NONE: Self = Self(u32::MAX);
    const ROOT_BIT: u32 = 1 << 31;

    /// The node at an index of the node slab.
    #[must_use]
    pub const fn node(index: u32) -> Self {
        debug_assert!(index < Self::ROOT_BIT);
        Self(index)
    }

    /// The root at an index of the namespace slab.
    #[must_use]
    pub const fn root(index: u32) -> Self {
        debug_assert!(index < Self::ROOT_BIT - 1);
        Self(index | Self::ROOT_BIT)
    }

    /// Is this a namespace's root (and not `NONE`)?
    #[must_use]
    pub const fn is_root(self) -> bool {
        self.0 & Self::ROOT_BIT != 0 && self.0 != u32::MAX
    }

    /// Is this `NONE`?
    #[must_use]
    pub const fn is_none(self) -> bool {
        self.0 == u32::MAX
    }

    /// This id, or `None` for `NONE`.
    #[must_use]
    pub const fn some(self) -> Option<Self> {
        if self.is_none() { None } else { Some(self) }
    }

    /// The index in the slab of its kind.
    #[must_use]
    pub const fn index(self) -> usize {
        (self.0 & !Self::ROOT_BIT) as usize
    }

    /// The raw word, to be hashed or stored.
    #[must_use]
    pub const fn word(self) -> u32 {
        self.0
    }

    /// The id whose raw word this is.
    #[must_use]
    pub const fn from_word(word: u32) -> Self {
        Self(word)
    }
}

/// What a caller holds of a sequence: its slot, and its serial number, which is never used again and so catches reuse
/// (I10).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Handle {
    /// Index in the sequence slab.
    pub slot: u32,
    /// Number of the sequence, counted from 0 over the life of the pager: its id in messages and drawings.
    pub serial: u64,
}
