//! What a batch keeps of a row's sequence.

use super::{Ahead, Growth};
use crate::ids::{BlockId, NodeId, Token};

/// Most tokens that wait in a row: a block of 16, and as many drafts.
pub const PENDING_MAX: usize = 32;

/// The tokens that wait in a row: those of a block of 16 lie in one cache line.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub struct Pending(pub [Token; PENDING_MAX]);

impl Pending {
    /// No token.
    pub const EMPTY: Self = Self([0; PENDING_MAX]);
}

/// What a step, and its commit, need of a row's sequence. An empty row, and one whose sequence must be looked at again,
/// has `EMPTY`.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Positions given to steps.
    pub planned: u32,
    /// Positions from `planned` up to here lie in one block, which may be written as it is; so may what rejected drafts leave
    /// of it. 0: that is not known.
    pub limit: u32,
    /// Tokens, placeholders included.
    pub len: u32,
    /// Tokens that are not pending.
    pub flushed: u32,
    /// Positions whose KV is written.
    pub committed: u32,
    /// A commit that ends before this touches nothing but the row: it makes no block full, and what it adds is pending.
    pub publish_at: u32,
    /// Positions for which the table has blocks; 0 in a cold row.
    pub table_end: u32,
    /// The end of the path, if the next full block may be published there without a look at the sequence: nothing waits
    /// in its tail, and it has nothing to hide or to announce.
    pub node: NodeId,
    /// The block of the positions below `limit`, or the table's last one.
    pub block: BlockId,
    /// The first position in it.
    pub block_start: u32,
}

impl Row {
    /// Nothing is kept.
    pub const EMPTY: Self = Self {
        planned: 0,
        limit: 0,
        len: 0,
        flushed: 0,
        committed: 0,
        publish_at: 0,
        table_end: 0,
        node: NodeId::NONE,
        block: 0,
        block_start: 0,
    };

    /// Must its sequence be looked at again? (A sequence that runs has a block.)
    #[must_use]
    pub const fn is_cold(&self) -> bool {
        self.table_end == 0
    }

    /// The slot of a position in `block`, less the position.
    #[must_use]
    pub fn slot_base(&self, block_size: u32) -> i64 {
        i64::from(self.block) * i64::from(block_size) - i64::from(self.block_start)
    }

    /// Do a warm row's next positions lie in the block that it may write as it is?
    #[must_use]
    pub const fn fits(&self, num: u32) -> bool {
        !self.is_cold() && self.planned + num <= self.limit
    }

    /// Are a warm row's next positions those of the usual path: in the block that it writes to, their tokens known, or the
    /// one placeholder that there may be?
    #[must_use]
    pub const fn is_usual(&self, num: u32, ahead: Ahead<'_>) -> bool {
        let end = self.planned.saturating_add(num);
        (num == 0 || end <= self.limit)
            && (end <= self.len || (matches!(ahead, Ahead::Unknown) && self.takes_placeholder(num)))
    }

    /// Would its next position be a placeholder, and may it?
    #[must_use]
    pub const fn takes_placeholder(&self, num: u32) -> bool {
        num == 1 && self.planned == self.len && self.planned > self.committed
    }

    /// Do its next positions end in the block behind its table, and need no other block? What precedes them in the
    /// last block may be written as it is, and there is room for tokens up to there.
    #[must_use]
    pub const fn grows(&self, num: u32, block_size: u32) -> bool {
        let end = self.planned + num;
        !self.is_cold()
            && end > self.table_end
            && end <= self.table_end + block_size
            && end < self.flushed + PENDING_MAX as u32
            && (self.planned == self.table_end || self.limit == self.table_end)
    }

    /// The next block belongs to the table.
    pub fn grow(&mut self, at: u32, block: BlockId, block_size: u32) -> Growth {
        let before = self.table_end / block_size;
        (self.block, self.block_start) = (block, self.table_end);
        self.table_end += block_size;
        self.limit = self.pending_limit(self.table_end);
        Growth { row: at, before, after: before + 1, len: self.len }
    }

    /// Adds tokens to what waits in a warm row (-1: a placeholder), if there is room for them and for the one that a commit
    /// may add.
    pub fn push(&mut self, pending: &mut Pending, tokens: &[i32]) -> bool {
        let waiting = (self.len - self.flushed) as usize;
        if self.is_cold() || waiting + tokens.len() >= PENDING_MAX {
            return false;
        }
        for (place, token) in pending.0[waiting..].iter_mut().zip(tokens) {
            *place = token.cast_unsigned();
        }
        self.len += tokens.len() as u32;
        true
    }

    /// All its positions are written; the token behind them, if there is one and they end what it has, waits from now on.
    /// Answers what was in that one's place: a line that is read is waited for together with others, one that is written
    /// is not.
    pub fn commit_all(&mut self, pending: &mut Pending, token: i32) -> Token {
        self.committed = self.planned;
        if token < 0 || self.len > self.planned {
            return 0;
        }
        let place = &mut pending.0[(self.len - self.flushed) as usize];
        self.len += 1;
        std::mem::replace(place, token.cast_unsigned())
    }

    /// The block that its first pending tokens fill is published: they wait no more.
    pub fn publish(&mut self, pending: &mut Pending, block_size: u32) {
        if self.len > self.publish_at {
            pending.0.copy_within(block_size as usize.., 0);
        }
        self.flushed = self.publish_at;
        self.publish_at += block_size;
        if self.limit > self.planned {
            // There is more room for tokens.
            self.limit = self.pending_limit(self.block_start + block_size);
        }
    }

    /// `limit` for a block that ends at `end`: less if tokens up to there have no room, with one that a commit may add.
    #[must_use]
    pub fn pending_limit(&self, end: u32) -> u32 {
        end.min(self.flushed + PENDING_MAX as u32 - 1).max(self.planned)
    }
}
