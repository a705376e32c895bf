//! The pager behind kvpager: a pool of KV-cache blocks, an exact prefix index, eviction.
//!
//! Layers, lowest first; each uses those above it in this list only:
//!
//! 1. [`ids`], [`config`], [`error`], [`memory`]
//! 2. [`slab`], [`list`], [`hash`], [`run`], [`tail`], [`content`], [`namespace`], [`digest`]: structures that know
//!    nothing of pools; [`admission`]: load control
//! 3. [`blocks`] (state of blocks), [`index`] (prefix tree), [`evict`] (policies): none knows the others
//! 4. [`copies`], [`stats`], [`batch`], [`ghosts`] (what was evicted), [`preemptions`], [`transit`] (what plans read),
//!    [`stored`] (what a store has), [`host`] (the second tier), [`transfers`] (plans), [`fences`], [`sequence`]
//! 5. [`pager`]: the only meeting point
//! 6. [`check`] (recounts everything), [`dump`] (draws it), [`replay`] (drives it with a trace)
//!
//! # Memory
//! Per block of the pool: a byte of state, and 4 bytes of free stack once it was in use. Per cached block: its tokens
//! (4 bytes each) and its id (4 bytes), in runs. Per node (a run of up to 8,192 tokens): 64 bytes, and 24 for
//! eviction. Two hash tables (2 to 5 bytes a block together) and the node slabs are reserved at construction; where
//! the allocator maps them afresh, the kernel gives their pages only as they are used.

#![forbid(unsafe_code)]

pub mod admission;
pub mod batch;
pub mod blocks;
pub mod check;
pub mod config;
pub mod content;
pub mod copies;
pub mod digest;
pub mod dump;
pub mod error;
pub mod evict;
pub mod fences;
pub mod ghosts;
pub mod hash;
pub mod host;
pub mod ids;
pub mod index;
pub mod list;
pub mod memory;
pub mod namespace;
pub mod pager;
pub mod preemptions;
pub mod replay;
pub mod run;
pub mod sequence;
pub mod slab;
pub mod stats;
pub mod stored;
pub mod tail;
pub mod transfers;
pub mod transit;

pub use config::{Config, PolicyKind};
pub use error::{Error, Result};
pub use pager::Pager;
