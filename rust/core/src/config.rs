//! A pager's settings and their limits.

use crate::error::{Error, Result};

/// Which eviction policy runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PolicyKind {
    /// Least recently used.
    Lru,
    /// Segmented LRU: what was hit survives a scan of one-off prompts.
    Slru,
}

impl PolicyKind {
    /// The policy of this name.
    ///
    /// # Errors
    /// `Config` for an unknown name.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "lru" => Ok(Self::Lru),
            "slru" => Ok(Self::Slru),
            _ => Err(Error::Config(format!("policy is {name:?}; it must be {POLICIES}"))),
        }
    }

    /// The policy's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Slru => "slru",
        }
    }
}

/// What names a policy, in words.
pub const POLICIES: &str = "\"lru\" or \"slru\"";
/// The limits of `num_blocks`, in words.
pub const NUM_BLOCKS_LIMITS: &str = "1 to 2147483647";
/// The limits of `num_host_blocks`, in words.
pub const NUM_HOST_BLOCKS_LIMITS: &str = "0 to 2147483647";
/// The limits of `num_ghost_blocks`, in words.
pub const NUM_GHOST_BLOCKS_LIMITS: &str = "0 to 2147483647";
/// The limits of `block_size`, in words.
pub const BLOCK_SIZE_LIMITS: &str = "1 to 1024";
/// The limits of `watermark`, in words.
pub const WATERMARK_LIMITS: &str = "0 to 1";
/// Most bytes that an identity or an encoded namespace may have.
pub const NAME_BYTES_MAX: usize = 1 << 16;
/// Largest block, in tokens.
pub const BLOCK_SIZE_MAX: usize = 1024;
/// A pool's tokens stay below this.
pub const POOL_TOKENS_END: u64 = 1 << 40;

/// Settings of a pager.
#[derive(Clone, Debug)]
pub struct Config {
    /// Blocks of the pool, the null block included; below 2^31.
    pub num_blocks: usize,
    /// Tokens of a block, 1 to 1024.
    pub block_size: usize,
    /// Who is evicted.
    pub policy: PolicyKind,
    /// Share of the usable blocks that an admission must leave free or evictable, 0 to 1.
    pub watermark: f64,
    /// Names weights, dtype, layout and rank in every digest that leaves the process.
    pub identity: Vec<u8>,
    /// Key of the hash table. No answer depends on it.
    pub seed: u64,
    /// Set block 0 aside.
    pub null_block: bool,
    /// Index committed blocks at all?
    pub prefix_cache: bool,
    /// Blocks of the host tier, below 2^31; 0 for none.
    pub num_host_blocks: usize,
    /// Evicted blocks that are remembered, below 2^31; 0 for none.
    pub num_ghost_blocks: usize,
}

impl Config {
    /// Checks every limit.
    ///
    /// # Errors
    /// `Config`, naming the setting, its value and its limit.
    pub fn validate(&self) -> Result<()> {
        let fail = |message: String| Err(Error::Config(message));
        if self.num_blocks >= 1 << 31 {
            return fail(format!("num_blocks is {}; it must be {NUM_BLOCKS_LIMITS}", self.num_blocks));
        }
        if self.usable_blocks() == 0 {
            let least = if self.null_block { ", and at least 2 with a null block" } else { "" };
            return fail(format!("num_blocks is {}; it must be {NUM_BLOCKS_LIMITS}{least}", self.num_blocks));
        }
        if self.block_size == 0 || self.block_size > BLOCK_SIZE_MAX {
            return fail(format!("block_size is {}; it must be {BLOCK_SIZE_LIMITS}", self.block_size));
        }
        if self.num_blocks as u64 * self.block_size as u64 >= POOL_TOKENS_END {
            return fail(format!(
                "num_blocks * block_size is {}; it must stay below {POOL_TOKENS_END}",
                self.num_blocks as u64 * self.block_size as u64
            ));
        }
        if self.num_host_blocks >= 1 << 31 {
            return fail(format!("num_host_blocks is {}; it must be {NUM_HOST_BLOCKS_LIMITS}", self.num_host_blocks));
        }
        if self.num_ghost_blocks >= 1 << 31 {
            return fail(format!(
                "num_ghost_blocks is {}; it must be {NUM_GHOST_BLOCKS_LIMITS}",
                self.num_ghost_blocks
            ));
        }
        if !(0.0..=1.0).contains(&self.watermark) {
            return fail(format!("watermark is {}; it must be {WATERMARK_LIMITS}", self.watermark));
        }
        check_identity(&self.identity)
    }

    /// Blocks that sequences can hold.
    #[must_use]
    pub fn usable_blocks(&self) -> usize {
        self.num_blocks.saturating_sub(usize::from(self.null_block))
    }

    /// Blocks that an admission leaves free or evictable while others run.
    #[must_use]
    #[expect(clippy::cast_sign_loss, reason = "the watermark is not negative")]
    #[expect(clippy::cast_precision_loss, reason = "fewer than 2^31 blocks")]
    pub fn reserve_blocks(&self) -> usize {
        (self.watermark * self.usable_blocks() as f64).ceil() as usize
    }
}

/// Checks the length of an identity.
///
/// # Errors
/// `Config` if it is too long.
pub fn check_identity(identity: &[u8]) -> Result<()> {
    if identity.len() > NAME_BYTES_MAX {
        return Err(Error::Config(format!("identity has {} bytes; the limit is {NAME_BYTES_MAX}", identity.len())));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> Config {
        Config {
            num_blocks: 8,
            block_size: 16,
            policy: PolicyKind::Lru,
            watermark: 0.0,
            identity: Vec::new(),
            seed: 0,
            null_block: false,
            prefix_cache: true,
            num_host_blocks: 0,
            num_ghost_blocks: 0,
        }
    }

    /// Passes at the limit, and one step beyond it is refused by a message with these words.
    fn assert_limit(good: &Config, bad: &Config, words: &str) {
        assert_eq!(good.validate(), Ok(()));
        match bad.validate() {
            Err(Error::Config(message)) => assert!(message.contains(words), "{message}"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn every_setting_has_a_limit() {
        let blocks = |num_blocks, null_block| Config { num_blocks, null_block, block_size: 1, ..config() };
        assert_limit(&blocks((1 << 31) - 1, false), &blocks(1 << 31, false), "num_blocks is 2147483648");
        assert_limit(&blocks(1, false), &blocks(0, false), "num_blocks is 0");
        assert_limit(&blocks(2, true), &blocks(1, true), "num_blocks is 1");
        let sizes = |block_size| Config { block_size, ..config() };
        assert_limit(&sizes(1), &sizes(0), "block_size is 0");
        assert_limit(&sizes(1024), &sizes(1025), "block_size is 1025");
        let tokens = |num_blocks| Config { num_blocks, block_size: 1024, ..config() };
        assert_limit(&tokens((1 << 30) - 1), &tokens(1 << 30), "num_blocks * block_size is 1099511627776");
        let identity = |len| Config { identity: vec![0; len], ..config() };
        assert_limit(&identity(NAME_BYTES_MAX), &identity(NAME_BYTES_MAX + 1), "identity has 65537 bytes");
        for watermark in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
            let good = Config { watermark: 1.0, ..config() };
            assert_limit(&good, &Config { watermark, ..config() }, "watermark is");
        }
    }

    #[test]
    fn the_reserve_is_a_share_of_the_usable_blocks_rounded_up() {
        let reserve =
            |watermark, null_block| Config { watermark, null_block, num_blocks: 101, ..config() }.reserve_blocks();
        assert_eq!([reserve(0.0, false), reserve(0.01, false), reserve(1.0, false)], [0, 2, 101]);
        assert_eq!([reserve(0.01, true), reserve(0.011, true), reserve(1.0, true)], [1, 2, 100]);
    }

    #[test]
    fn policies_have_names() {
        for policy in [PolicyKind::Lru, PolicyKind::Slru] {
            assert_eq!(PolicyKind::from_name(policy.name()), Ok(policy));
        }
        assert_eq!(
            PolicyKind::from_name("LRU"),
            Err(Error::Config("policy is \"LRU\"; it must be \"lru\" or \"slru\"".to_owned()))
        );
    }
}
