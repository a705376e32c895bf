//! `kvpager.Pager`.

use std::sync::Arc;

use kvpager_core::batch::{BUFFERS_LIMITS, COUNT_LIMITS, MAX_SEQS_LIMITS, Shape};
use kvpager_core::config::{
    BLOCK_SIZE_LIMITS, Config, NUM_BLOCKS_LIMITS, NUM_GHOST_BLOCKS_LIMITS, NUM_HOST_BLOCKS_LIMITS,
};
use kvpager_core::digest::meta_bytes;
use kvpager_core::ids::{BlockId, PlanId};
use kvpager_core::memory::with_capacity;
use kvpager_core::pager::{Admitted, Computing, End, Wish};
use kvpager_core::{Error, Pager, check, dump};
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict, PyString, PyType};

use crate::arguments::{self, Given, is_bool, wrong_type};
use crate::attached::{Attached, Held};
use crate::batch::PyBatch;
use crate::errors;
use crate::namespace;
use crate::plans::{self, Made, Reported, Told, ToldKeys};
use crate::sequence::PySequence;
use crate::shared::{Shared, none_if_full};
use crate::tokens::Tokens;
use crate::victims;

/// A pool of KV blocks with an exact prefix cache.
///
/// Parameters
/// ----------
/// num_blocks : int
///     Blocks of the pool, 1..2**31-1; `num_blocks * block_size` stays below 2**40. Ids are 0..num_blocks-1.
/// block_size : int
///     Tokens of a block, 1..1024, any value.
/// policy : {"lru", "slru"}
///     Who is evicted. "slru" (segmented LRU) keeps what was hit through a scan of one-off prompts.
/// watermark : float
///     Share of the usable blocks, 0..1, that an admission leaves free or evictable while other sequences run.
/// identity : bytes
///     Names weights, dtype, layout and rank in everything that leaves the process. At most 65,536 bytes.
/// seed : int or None
///     Key of the hash table, 0..2**64-1; None draws it from the operating system. No answer depends on it.
/// null_block : bool
///     Set block 0 aside: it is never handed out.
/// prefix_cache : bool
///     False: nothing is ever shared between prompts.
/// num_host_blocks : int
///     Blocks of a second tier, in the host's memory, 0..2**31-1, with ids of their own: where `offload` and `swap_out`
///     copy to. 0: there is none.
/// num_ghost_blocks : int
///     Evicted blocks that are remembered, 0..2**31-1, to count those that are asked for again (`Stats.refaulted_blocks`).
///     As many as the pool has blocks tell what a pool of twice the size would have kept. 0: none, and no cost.
///
/// Raises
/// ------
/// ConfigError
///     For a value outside its limits. AllocationError if the machine refuses memory for the tables.
///
/// Any thread may call. In the child of `os.fork()` every call raises ForkedProcess. Construction takes
/// microseconds for any size.
#[pyclass(frozen, name = "Pager", module = "kvpager")]
pub struct PyPager {
    shared: Arc<Shared>,
    config: Config,
    attached: Attached,
}

impl PyPager {
    /// The pager and its lock.
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

#[pymethods]
impl PyPager {
    #[new]
    #[pyo3(
        signature = (
            num_blocks, block_size=Given::NOTHING, *, policy=Given::NOTHING, watermark=Given::NOTHING,
            identity=Given::NOTHING, seed=None, null_block=Given::NOTHING, prefix_cache=Given::NOTHING,
            num_host_blocks=Given::NOTHING, num_ghost_blocks=Given::NOTHING
        ),
        text_signature = "(num_blocks, block_size=16, *, policy='lru', watermark=0.0, identity=b'', seed=None, \
            null_block=False, prefix_cache=True, num_host_blocks=0, num_ghost_blocks=0)"
    )]
    #[expect(clippy::too_many_arguments, reason = "settings, by name")]
    #[expect(clippy::similar_names, reason = "ghost and host are what the settings are called")]
    fn new(
        py: Python<'_>,
        num_blocks: Given<'_>,
        block_size: Given<'_>,
        policy: Given<'_>,
        watermark: Given<'_>,
        identity: Given<'_>,
        seed: Option<Given<'_>>,
        null_block: Given<'_>,
        prefix_cache: Given<'_>,
        num_host_blocks: Given<'_>,
        num_ghost_blocks: Given<'_>,
    ) -> PyResult<Self> {
        let to_python = |error| errors::to_python(py, error);
        let config = Config {
            num_blocks: num_blocks.setting("num_blocks", 0, NUM_BLOCKS_LIMITS)?,
            block_size: block_size.setting("block_size", 16, BLOCK_SIZE_LIMITS)?,
            policy: policy.policy()?,
            watermark: watermark.watermark()?,
            identity: identity.bytes("identity")?.unwrap_or_default().to_vec(),
            seed: match seed {
                Some(seed) => seed.setting("seed", 0, "0 to 18446744073709551615, or None")?,
                None => random_seed(py)?,
            },
            null_block: null_block.flag("null_block", false)?,
            prefix_cache: prefix_cache.flag("prefix_cache", true)?,
            num_host_blocks: num_host_blocks.setting("num_host_blocks", 0, NUM_HOST_BLOCKS_LIMITS)?,
            num_ghost_blocks: num_ghost_blocks.setting("num_ghost_blocks", 0, NUM_GHOST_BLOCKS_LIMITS)?,
        };
        let pager = Pager::new(config.clone()).map_err(to_python)?;
        Ok(Self { shared: Arc::new(Shared::new(pager)), config, attached: Attached::default() })
    }

    // Without the seed, which is secret: reprs end up in logs.
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let truth = |value| if value { "True" } else { "False" };
        let Config { num_blocks, block_size, watermark, num_host_blocks, num_ghost_blocks, .. } = self.config;
        let unless_0 = |name, count| if count > 0 { format!(", {name}={count}") } else { String::new() };
        let host = unless_0("num_host_blocks", num_host_blocks) + &unless_0("num_ghost_blocks", num_ghost_blocks);
        Ok(format!(
            "kvpager.Pager(num_blocks={num_blocks}, block_size={block_size}, policy='{}', watermark={watermark:?}, identity={}, null_block={}, prefix_cache={}{host})",
            self.config.policy.name(),
            self.identity(py)?.repr()?,
            truth(self.config.null_block),
            truth(self.config.prefix_cache)
        ))
    }

    /// Blocks of the pool, the null block included.
    #[getter]
    fn num_blocks(&self) -> usize {
        self.config.num_blocks
    }

    /// Tokens of a block.
    #[getter]
    fn block_size(&self) -> usize {
        self.config.block_size
    }

    /// Name of the eviction policy.
    #[getter]
    fn policy(&self) -> &'static str {
        self.config.policy.name()
    }

    /// Share of the usable blocks that an admission leaves free or evictable while other sequences run.
    #[getter]
    fn watermark(&self) -> f64 {
        self.config.watermark
    }

    /// Name of weights, dtype, layout and rank; `reset` may change it.
    #[getter]
    fn identity<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let identity = self.shared.read(py, |pager| Ok(pager.config().identity.clone()))?;
        Ok(PyBytes::new(py, &identity))
    }

    /// Key of the hash table. No answer depends on it; secret, where prompts come from strangers.
    #[getter]
    fn seed(&self) -> u64 {
        self.config.seed
    }

    /// Is block 0 set aside?
    #[getter]
    fn null_block(&self) -> bool {
        self.config.null_block
    }

    /// Are committed blocks shared between prompts?
    #[getter]
    fn prefix_cache(&self) -> bool {
        self.config.prefix_cache
    }

    /// Blocks of the host tier, 0 without one.
    #[getter]
    fn num_host_blocks(&self) -> usize {
        self.config.num_host_blocks
    }

    /// Evicted blocks that are remembered.
    #[getter]
    fn num_ghost_blocks(&self) -> usize {
        self.config.num_ghost_blocks
    }

    /// Blocks without content.
    #[getter]
    fn num_free_blocks(&self, py: Python<'_>) -> PyResult<usize> {
        self.shared.read(py, |pager| Ok(pager.num_free_blocks()))
    }

    /// Cached blocks that a call could evict.
    #[getter]
    fn num_evictable_blocks(&self, py: Python<'_>) -> PyResult<usize> {
        self.shared.read(py, |pager| Ok(pager.num_evictable_blocks()))
    }

    /// Free and evictable blocks that no transfer can have yet: kernels of open steps may still use them. 0 without host
    /// blocks.
    #[getter]
    fn num_fenced_blocks(&self, py: Python<'_>) -> PyResult<usize> {
        let (free, evictable) = self.shared.read(py, |pager| Ok(pager.num_fenced()))?;
        Ok(free + evictable)
    }

    /// Start a sequence: its cached prefix is pinned, the exact shortfall evicted, blocks are taken for the whole
    /// prompt. All or nothing.
    ///
    /// Parameters
    /// ----------
    /// prompt : list, tuple or 1-D integer buffer, at least one token, values 0..2**31-1
    ///     A contiguous int32 or uint32 array is read in place; other integer types are converted, lists at some 5 ns
    ///     a token.
    /// namespace : bytes or tuple of (kind, bytes) pairs
    ///     Equal tokens in two namespaces never share.
    /// pin : bool
    ///     The sequence only holds a prefix (a hot system prompt): it is active, but not a running neighbour for the
    ///     watermark.
    /// wait : bool
    ///     Where a running sequence is about to compute more of this prompt than is cached, take nothing and return a
    ///     Computing: admit again once that sequence has committed, or is gone.
    /// fetch : bool, or an object whose `should_fetch(num_device_tokens, num_host_tokens)` decides
    ///     Where the host has more of this prompt than the device, the sequence starts in state "fetching", and its `fetch`
    ///     is the plan that brings those blocks (one plan for all that want the same): when it ends, the sequence runs.
    /// fetch_min_tokens : int
    ///     But only for so many tokens, 1 or more: a short prefix is computed sooner than it is copied.
    ///
    /// Returns
    /// -------
    /// Sequence, or Computing (only with `wait`)
    ///     `num_cached` tokens are computed already, whole blocks and never the last token; the others need `slots`, a
    ///     kernel, and `commit`.
    ///
    /// Raises
    /// ------
    /// TokenError, TokenTypeError
    ///     An empty prompt, a bad value (with its position), a bad type.
    /// NeverFits
    ///     The prompt needs more blocks than the pool has: waiting cannot help.
    /// OutOfBlocks
    ///     There is no room now. Nothing was changed.
    ///
    /// Cost: comparing the cached tokens, copying the others.
    #[pyo3(
        signature = (
            prompt, *, namespace=Given::NOTHING, pin=Given::NOTHING, wait=Given::NOTHING, fetch=Given::NOTHING,
            fetch_min_tokens=Given::NOTHING
        ),
        text_signature = "($self, prompt, *, namespace=b'', pin=False, wait=False, fetch=False, fetch_min_tokens=1)"
    )]
    #[expect(clippy::too_many_arguments, reason = "options, by name")]
    fn admit<'py>(
        &self,
        py: Python<'py>,
        prompt: &Bound<'py, PyAny>,
        namespace: Given<'py>,
        pin: Given<'py>,
        wait: Given<'py>,
        fetch: Given<'py>,
        fetch_min_tokens: Given<'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let arguments = request(py, prompt, &namespace, &pin);
        let arguments =
            arguments.and_then(|request| wished(py, &self.shared, request, &wait, &fetch, &fetch_min_tokens));
        let (tokens, namespace, wish) = self.shared.arguments(py, arguments)?;
        let started = self.shared.change_with(py, &tokens, |pager, tokens| pager.admit_as(tokens, &namespace, wish))?;
        started_of(py, &self.shared, started)
    }

    /// As `admit`, but None where that raises OutOfBlocks. A prompt that can never fit still raises NeverFits:
    /// waiting would be for ever.
    #[pyo3(
        signature = (
            prompt, *, namespace=Given::NOTHING, pin=Given::NOTHING, wait=Given::NOTHING, fetch=Given::NOTHING,
            fetch_min_tokens=Given::NOTHING
        ),
        text_signature = "($self, prompt, *, namespace=b'', pin=False, wait=False, fetch=False, fetch_min_tokens=1)"
    )]
    #[expect(clippy::too_many_arguments, reason = "options, by name")]
    fn try_admit<'py>(
        &self,
        py: Python<'py>,
        prompt: &Bound<'py, PyAny>,
        namespace: Given<'py>,
        pin: Given<'py>,
        wait: Given<'py>,
        fetch: Given<'py>,
        fetch_min_tokens: Given<'py>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let arguments = request(py, prompt, &namespace, &pin);
        let arguments =
            arguments.and_then(|request| wished(py, &self.shared, request, &wait, &fetch, &fetch_min_tokens));
        let (tokens, namespace, wish) = self.shared.arguments(py, arguments)?;
        let started = self
            .shared
            .change_with(py, &tokens, |pager, tokens| none_if_full(pager.admit_as(tokens, &namespace, wish)))?;
        started.map(|started| started_of(py, &self.shared, started)).transpose()
    }

    /// Would the same `admit` succeed, if nothing happens in between? Changes nothing, counts nothing. False also for
    /// a prompt that can never fit. Raises TokenError and TokenTypeError as `admit` does.
    ///
    /// True is a promise; False may be too careful: a peek does not release the handles that the garbage collector
    /// took, as calls that change the pager do. So do not wait in a loop of `can_admit` alone: `try_admit` releases
    /// them first, and then admits if it can.
    #[pyo3(signature = (prompt, *, namespace=Given::NOTHING, pin=Given::NOTHING), text_signature = "($self, prompt, *, namespace=b'', pin=False)")]
    fn can_admit(
        &self,
        py: Python<'_>,
        prompt: &Bound<'_, PyAny>,
        namespace: Given<'_>,
        pin: Given<'_>,
    ) -> PyResult<bool> {
        let (tokens, namespace, _) = request(py, prompt, &namespace, &pin)?;
        self.shared.read_with(py, &tokens, |pager, tokens| pager.can_admit(tokens, &namespace))
    }

    /// What an `admit` of this prompt would hit now: a PrefixMatch with `num_tokens`, `num_blocks`, `computing`, who is about
    /// to compute what follows, and `num_host_tokens`, what `fetch` would bring. A peek: no recency, no statistic changes,
    /// no dropped handle is released. Raises TokenError and TokenTypeError as `admit` does. Cost: comparing the cached
    /// tokens, in both tiers.
    #[pyo3(name = "r#match", signature = (prompt, *, namespace=Given::NOTHING), text_signature = "($self, prompt, *, namespace=b'')")]
    fn find<'py>(
        &self,
        py: Python<'py>,
        prompt: &Bound<'py, PyAny>,
        namespace: Given<'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        let (tokens, namespace, _) = request(py, prompt, &namespace, &Given::NOTHING)?;
        let (found, num_host_tokens) = self.shared.read_with(py, &tokens, |pager, tokens| {
            let found = pager.find_prefix(tokens, &namespace)?;
            Ok((found, pager.num_host_tokens(tokens, &namespace, found.num_tokens)))
        })?;
        let computing = found.computing.map(|computing| computing_of(py, computing)).transpose()?;
        let class = CLASS.import(py, "kvpager.types", "PrefixMatch")?;
        class.call1((found.num_tokens, found.num_blocks, computing, num_host_tokens))
    }

    /// Rows for sequences that are stepped together: one call a decode step.
    ///
    /// Parameters
    /// ----------
    /// max_seqs : int
    ///     Rows, 1..65,536.
    /// max_blocks : int
    ///     Columns of the block tables: the longest sequence has `max_blocks * block_size` tokens.
    /// max_tokens : int
    ///     Positions that one step can plan.
    /// buffers : int
    ///     Steps that may be open at once, 1..4, each with arrays of its own: 2 to plan one step ahead.
    /// pad_block, pad_slot, pad_seq_len : int
    ///     What the arrays hold behind a table's last block, behind the last planned position, for an empty row.
    /// arrays : dict of name to writable buffer, optional
    ///     Memory of yours for some of `block_tables`, `seq_lens`, `positions`, `query_start_loc` (int32) and
    ///     `slot_mapping` (int64), of all buffers one behind the other: pinned, or shared with another process.
    ///     C-contiguous; sizes as of the attributes of these names of `Batch`.
    ///
    /// Raises
    /// ------
    /// ConfigError
    ///     For a value outside its limits, or an array of the wrong size or type. AllocationError.
    #[pyo3(
        signature = (
            max_seqs, max_blocks, max_tokens=Given::NOTHING, *, buffers=Given::NOTHING, pad_block=Given::NOTHING,
            pad_slot=Given::NOTHING, pad_seq_len=Given::NOTHING, arrays=None
        ),
        text_signature = "($self, max_seqs, max_blocks, max_tokens=8192, *, buffers=2, pad_block=0, pad_slot=-1, \
            pad_seq_len=0, arrays=None)"
    )]
    #[expect(clippy::too_many_arguments, reason = "settings, by name")]
    fn batch(
        &self,
        py: Python<'_>,
        max_seqs: Given<'_>,
        max_blocks: Given<'_>,
        max_tokens: Given<'_>,
        buffers: Given<'_>,
        pad_block: Given<'_>,
        pad_slot: Given<'_>,
        pad_seq_len: Given<'_>,
        arrays: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<PyBatch> {
        let (int32, int64) = ("an int32", "an int64");
        let shape = Shape {
            max_seqs: max_seqs.setting("max_seqs", 0, MAX_SEQS_LIMITS)?,
            max_blocks: max_blocks.setting("max_blocks", 0, COUNT_LIMITS)?,
            max_tokens: max_tokens.setting("max_tokens", 8192, COUNT_LIMITS)?,
            buffers: buffers.setting("buffers", 2, BUFFERS_LIMITS)?,
            pad_block: pad_block.setting("pad_block", 0, int32)?,
            pad_slot: pad_slot.setting("pad_slot", -1, int64)?,
            pad_seq_len: pad_seq_len.setting("pad_seq_len", 0, int32)?,
        };
        PyBatch::new(py, &self.shared, shape, arrays)
    }

    /// Plan to copy cold blocks to the host, so that they outlive their eviction: the coldest cached ones that the host lacks.
    /// Call it between steps, with as many blocks as the link copies meanwhile.
    ///
    /// Parameters
    /// ----------
    /// num_blocks : int
    ///     So many blocks at most, 1 or more.
    ///
    /// Returns
    /// -------
    /// Plan or None
    ///     What to copy, from the device to the host; `start` and `complete` it. None if there is nothing to copy, or the
    ///     host has no room.
    ///
    /// Raises
    /// ------
    /// TransferError
    ///     There are no host blocks, or copies are queued: `take_copies` comes first.
    /// ValueError, TypeError
    ///     `num_blocks` is not 1 or more.
    ///
    /// The blocks stay cached, and are not evicted before the plan has ended. Cost: for each block once, its path. If memory
    /// runs out (or Ctrl-C comes) when the plan is made already, it is among `plans()`.
    #[pyo3(signature = (num_blocks))]
    fn offload<'py>(&self, py: Python<'py>, num_blocks: Given<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let num_blocks = self.shared.arguments(py, num_blocks.count("num_blocks", 1))?;
        let made = self.shared.change(py, |pager| {
            let id = pager.offload(num_blocks)?;
            Ok(id.map(|id| Made::of(pager, id)))
        })?;
        made.map(|made| made.build(py)).transpose()
    }

    /// Plan to copy what a running sequence has published and the host lacks (write-through): call it after a `commit`
    /// whose blocks are worth keeping. Returns a Plan, or None if there is nothing to copy, or the host has no room.
    /// StaleHandle unless the sequence runs; ValueError if it belongs to another pager; TransferError as `offload`. Cost:
    /// the length of its path. As `offload` if memory runs out.
    fn offload_committed<'py>(
        &self,
        py: Python<'py>,
        sequence: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let handle = match sequence.cast::<PySequence>() {
            Ok(sequence) => sequence.get().handle_in(py, &self.shared, "offload_committed"),
            Err(_) => Err(wrong_type(sequence, "sequence", "a kvpager.Sequence")),
        };
        let handle = self.shared.arguments(py, handle)?;
        let made = self.shared.change(py, |pager| {
            let id = pager.offload_committed(handle)?;
            Ok(id.map(|id| Made::of(pager, id)))
        })?;
        made.map(|made| made.build(py)).transpose()
    }

    /// Say that a mover copies this plan's blocks from now on: call it before the first byte moves. `complete` or `fail` it
    /// when the copies are done.
    ///
    /// Parameters
    /// ----------
    /// plan : Plan
    ///     Of this pager. Known by `id` and `generation`: one that came through another process will do.
    /// tick : int, optional
    ///     The time on a clock of yours, 0..2**63-1, for `plans(older_than=...)`; `stats().clock_ticks` by default.
    ///
    /// Returns
    /// -------
    /// bool
    ///     True: copy now. False: copy nothing; the plan has ended (its sequence was released, say; counted in
    ///     `late_reports`), or it is under way already, for another sequence that waits for the same fetch.
    ///
    /// Raises
    /// ------
    /// TransferError
    ///     It was abandoned. Nothing was changed.
    /// ValueError, TypeError
    ///     It is no plan of this pager, or no plan, or `tick` is no time.
    #[pyo3(signature = (plan, tick=None))]
    fn start(&self, py: Python<'_>, plan: &Bound<'_, PyAny>, tick: Option<&Bound<'_, PyAny>>) -> PyResult<bool> {
        let arguments = Reported::of(plan)
            .and_then(|plan| Ok((plan, tick.map(|value| arguments::tick(value, "tick")).transpose()?)));
        let (plan, tick) = self.shared.arguments(py, arguments)?;
        self.report(py, &plan, |pager, id| pager.start_plan(id, tick))
    }

    /// Say that all blocks of a started plan have arrived: the copies are done, not only queued. Blocks that it guarded are
    /// in use from now on, and sequences that waited for it go on. False if the plan has ended already: a late report changes
    /// nothing, and is counted. TransferError unless it is started; ValueError if it is no plan of this pager. Cost: the
    /// blocks that are published.
    fn complete(&self, py: Python<'_>, plan: &Bound<'_, PyAny>) -> PyResult<bool> {
        let plan = self.shared.arguments(py, Reported::of(plan))?;
        self.report(py, &plan, |pager, id| pager.end_plan(id, End::Complete))
    }

    /// Say that a started plan has failed, and that its mover writes nothing more (else `abandon` it). What did arrive is
    /// kept where it is of use; a sequence that waited goes on, and computes what is missing, or is where it was before.
    ///
    /// Parameters
    /// ----------
    /// plan : Plan
    /// done : sequence of bools, or 1-D buffer of bools or integers, [len(plan)], optional
    ///     Which blocks have arrived nevertheless; none by default.
    ///
    /// Returns
    /// -------
    /// bool
    ///     False if the plan has ended already, as of `complete`.
    ///
    /// Raises
    /// ------
    /// TransferError
    ///     It is not started. Nothing was changed.
    /// ValueError, TypeError
    ///     It is no plan of this pager, or `done` has another length or type. Nothing was changed.
    #[pyo3(signature = (plan, done=None))]
    fn fail(&self, py: Python<'_>, plan: &Bound<'_, PyAny>, done: Option<&Bound<'_, PyAny>>) -> PyResult<bool> {
        let arguments = Reported::of(plan).and_then(|plan| Ok((plan, done.map(plans::mask).transpose()?)));
        let (plan, done) = self.shared.arguments(py, arguments)?;
        self.report(py, &plan, |pager, id| pager.end_plan(id, End::Failed(done.as_deref())))
    }

    /// Take back a plan that was never started: nothing is copied, and all is as after a `fail` of nothing. False if the plan
    /// has ended already. TransferError once it is started; ValueError if it is no plan of this pager.
    fn cancel(&self, py: Python<'_>, plan: &Bound<'_, PyAny>) -> PyResult<bool> {
        let plan = self.shared.arguments(py, Reported::of(plan))?;
        self.report(py, &plan, |pager, id| pager.end_plan(id, End::Cancelled))
    }

    /// Give up a started plan whose mover does not answer. Sequences that waited do not wait any more (fetching ones are
    /// preempted, others are where they were before), and the blocks that may still be written are quarantined: nobody gets
    /// them until `reclaim`. False if the plan has ended or is abandoned already. TransferError if it was not started; ValueError if it is no
    /// plan of this pager.
    fn abandon(&self, py: Python<'_>, plan: &Bound<'_, PyAny>) -> PyResult<bool> {
        let plan = self.shared.arguments(py, Reported::of(plan))?;
        self.report(py, &plan, Pager::abandon_plan)
    }

    /// Take the blocks of an abandoned plan out of quarantine, once its mover has stopped for certain. False if the plan has
    /// ended already. TransferError unless it is abandoned; ValueError if it is no plan of this pager.
    fn reclaim(&self, py: Python<'_>, plan: &Bound<'_, PyAny>) -> PyResult<bool> {
        let plan = self.shared.arguments(py, Reported::of(plan))?;
        self.report(py, &plan, Pager::reclaim_plan)
    }

    /// The keys and metas by which a store knows the full blocks of these tokens: a StoreKeys of n blocks. (n is less where
    /// the tokens end within a run of content tokens, which may go on.) They depend on `identity`, namespace, block size
    /// and all tokens down to the block; `docs/design/rules.md` 17.1 says how. Raises TokenError and TokenTypeError as
    /// `match` does. Changes nothing. Cost: some 0.2 us a block.
    #[pyo3(signature = (tokens, *, namespace=Given::NOTHING), text_signature = "($self, tokens, *, namespace=b'')")]
    fn store_keys<'py>(
        &self,
        py: Python<'py>,
        tokens: &Bound<'py, PyAny>,
        namespace: Given<'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (tokens, namespace, _) = request(py, tokens, &namespace, &Given::NOTHING)?;
        let width = meta_bytes(self.config.block_size);
        let keys = self
            .shared
            .read_with(py, &tokens, |pager, tokens| ToldKeys::of(&pager.store_keys(tokens, &namespace)?, width))?;
        keys.build(py)
    }

    /// Plan to bring `num_blocks` blocks or some more, the coldest of the host's cache that no store has had, to a store.
    /// Returns a Plan whose `records` say how the store is to know them, or None if there are none. ValueError for less
    /// than 1; TransferError without a host tier.
    ///
    /// The blocks stay cached, and are not evicted before the plan has ended; one that was abandoned holds them until
    /// `reclaim`. Cost: what is to be saved, and a look at each block that became cached since the last call.
    #[pyo3(signature = (num_blocks))]
    fn save<'py>(&self, py: Python<'py>, num_blocks: Given<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let num_blocks = self.shared.arguments(py, num_blocks.count("num_blocks", 1))?;
        let made = self.shared.change(py, |pager| {
            let id = pager.save(num_blocks)?;
            Ok(id.map(|id| Made::of(pager, id)))
        })?;
        made.map(|made| made.build(py)).transpose()
    }

    /// Plan to bring blocks of a prompt from a store to the host: those of its first `num_tokens` tokens (what the store
    /// has: see `kvpager.tiers`) that the host lacks, as far as it has room. Returns a Plan whose `records` say how the store
    /// knows them; when it is complete, `admit(fetch=True)` finds them. None if the host lacks nothing, or has no room.
    /// Where another plan brings the same already, that one: `start` tells whether it is under way.
    ///
    /// Raises TokenError and TokenTypeError as `match` does; ValueError if `num_tokens` is below 0; TransferError without a
    /// host tier. A prompt's last token is never loaded. Cost: some 0.2 us a block of the first `num_tokens`.
    #[pyo3(
        signature = (tokens, num_tokens, *, namespace=Given::NOTHING),
        text_signature = "($self, tokens, num_tokens, *, namespace=b'')"
    )]
    fn load<'py>(
        &self,
        py: Python<'py>,
        tokens: &Bound<'py, PyAny>,
        num_tokens: &Bound<'py, PyAny>,
        namespace: Given<'py>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let (tokens, namespace, _) = self.shared.arguments(py, request(py, tokens, &namespace, &Given::NOTHING))?;
        let num_tokens = self.shared.arguments(py, arguments::amount(num_tokens, "num_tokens"))?;
        let made = self.shared.change_with(py, &tokens, |pager, tokens| {
            let id = pager.load(tokens, &namespace, num_tokens)?;
            Ok(id.map(|id| Made::of(pager, id)))
        })?;
        made.map(|made| made.build(py)).transpose()
    }

    /// The plans that have not ended, in the order in which they were made: a list of PlanStatus (`plan`, `state`, `tick`).
    /// With `older_than` (0..2**63-1) only those that were started at a smaller tick, abandoned ones included: what to
    /// `abandon` after a time limit. Changes nothing. Cost: the blocks of the plans.
    #[pyo3(signature = (older_than=None))]
    fn plans<'py>(&self, py: Python<'py>, older_than: Option<&Bound<'py, PyAny>>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let older_than = older_than.map(|value| arguments::tick(value, "older_than")).transpose()?;
        let told = self.shared.read(py, |pager| {
            let plans = pager.unfinished_plans(older_than)?;
            let mut told = with_capacity(plans.len())?;
            for plan in plans {
                told.push((Told::of(plan)?, plan.state));
            }
            Ok(told)
        })?;
        told.into_iter().map(|(told, state)| told.with_state(py, state)).collect()
    }

    /// The block copies that `append`, `extend` and `slots` asked for since the last call: int32 [n, 2], (source,
    /// target) block ids, in the order of asking. No block is both source and target, so they may run in any order.
    /// Carry them out before the kernel that writes to slots given since. The sources are held until this call.
    fn take_copies<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i32>>> {
        let copies = self.shared.change(py, Pager::take_copies)?;
        let shape = [copies.len(), 2];
        // The ids stay where they are: none of this asks for memory.
        let ids: Vec<i32> = copies.into_flattened().into_iter().map(BlockId::cast_signed).collect();
        PyArray1::from_vec(py, ids).reshape(shape)
    }

    /// From now on the tier's `on_reset()` is called after each `reset` that leaves the identity as it is, and its
    /// `on_forget(tokens, namespace)` after each `forget`: what a store has of such blocks must not come back. If it has a
    /// `lock`, `reset` and `forget` hold that from before they change the pager until they return; if it has an attribute
    /// `stale`, that becomes what one of its methods raised. A `kvpager.tiers.Tier` attaches itself. The pager holds it
    /// weakly. TypeError for what has no such methods.
    fn attach(&self, tier: &Bound<'_, PyAny>) -> PyResult<()> {
        self.attached.add(tier)
    }

    /// Nothing cached so far can hit again (new weights, say). Cached blocks are free at once; running sequences go
    /// on, publish nothing more, and free their blocks at release. `identity` replaces the pager's; where that is no new
    /// one, attached tiers are cleared. ConfigError if it is too long; whatever a tier raises, and then the pager is reset.
    /// Cost: the same for every pool, and what the tiers need.
    #[pyo3(signature = (identity=None))]
    fn reset(&self, py: Python<'_>, identity: Option<Given<'_>>) -> PyResult<()> {
        let identity = identity.as_ref().map(|identity| identity.bytes("identity")).transpose();
        let identity = self.shared.arguments(py, identity)?.flatten().map(<[u8]>::to_vec);
        let tiers = self.held_tiers(py)?;
        let is_new = self.shared.change(py, |pager| {
            let is_new = identity.as_ref().is_some_and(|identity| *identity != pager.config().identity);
            pager.reset(identity).map(|()| is_new)
        })?;
        if is_new { Ok(()) } else { tiers.tell(|tier| tier.call_method0(intern!(py, "on_reset"))) }
    }

    /// Drop the last of the given blocks, and all that is indexed below it, from the index; returns how many blocks
    /// those were, 0 if the path is not indexed. Sequences whose path it was go on, but publish nothing more.
    /// ValueError unless `tokens` are a whole number of blocks, at least one; whatever an attached tier raises, and then the
    /// pager has forgotten. Cost: what is dropped, and what the tiers need.
    #[pyo3(signature = (tokens, *, namespace=Given::NOTHING), text_signature = "($self, tokens, *, namespace=b'')")]
    fn forget(&self, py: Python<'_>, tokens: &Bound<'_, PyAny>, namespace: Given<'_>) -> PyResult<usize> {
        let name = namespace.get().map_or_else(|| PyBytes::new(py, b"").into_any(), Bound::clone);
        let given = tokens;
        let (tokens, namespace, _) = self.shared.arguments(py, request(py, tokens, &namespace, &Given::NOTHING))?;
        let tiers = self.held_tiers(py)?;
        let dropped = self.shared.change_with(py, &tokens, |pager, tokens| pager.forget(tokens, &namespace))?;
        tiers.tell(|tier| tier.call_method1(intern!(py, "on_forget"), (given, &name)))?;
        Ok(dropped)
    }

    /// Who should give way so that a call which does not fit does, and how: by recompute, by swap, or by rows that sit out.
    /// Changes nothing; whoever asks does what it says, or something else.
    ///
    /// Parameters
    /// ----------
    /// needed_blocks : int
    ///     Blocks that the call needs in all: `OutOfBlocks.needed`, `Batch.blocks_needed`.
    /// policy : {"newest", "cheapest", "least_progress", "priority"}
    ///     Who goes first: who came in or came back last; who is cheapest to bring back for each block that it frees; who
    ///     has the fewest tokens to lose; who has the lowest priority.
    /// candidates : list of Sequence or None
    ///     Who may go, all running; None: all that run and are not pinned.
    /// priorities : list of int
    ///     One for each candidate, for "priority" only: the lowest goes first.
    /// cost : RecoveryCost or None
    ///     What bringing a sequence back costs (`CostModel.recovery_cost`); None: by the tokens to compute again.
    /// spare_after : int
    ///     Whoever was preempted so often is spared as long as there are candidates that were not ("priority": counts one
    ///     priority higher). No candidate that stays has been preempted less often by more than this.
    /// keep : int
    ///     So many candidates stay in any case. 1: a step has a row left to compute.
    /// left_out : list of int
    ///     The candidates that could sit out instead, by their places: `OutOfBlocks.rows`, where candidates are the rows.
    /// finishing : list of int or None
    ///     Steps until each candidate is expected to end, None where nobody knows.
    ///
    /// Returns
    /// -------
    /// list of Victim
    ///     Empty if the call fits. When the first k have been preempted, or swapped out to the end, free + evictable has grown
    ///     by the sum of their `blocks`: shared blocks count for whoever lets go of them last. Or, if sitting out costs no more,
    ///     a Victim with action "stall" for each of `left_out`; never all candidates.
    ///
    /// Raises
    /// ------
    /// NeverFits
    ///     The pool is too small for the call.
    /// OutOfBlocks
    ///     All that may go do not free enough: `keep` stands in the way, or blocks that others hold.
    /// StaleHandle
    ///     A candidate does not run.
    /// ValueError, TypeError
    ///     For arguments that do not fit each other.
    ///
    /// Cost: sorting the candidates, and walking the nodes and unpublished blocks of those that are taken; for "cheapest" and
    /// "least_progress" of all candidates. Nothing else is looked at.
    #[pyo3(
        signature = (
            needed_blocks, policy=Given::NOTHING, *, candidates=None, priorities=None, cost=None,
            spare_after=Given::NOTHING, keep=Given::NOTHING, left_out=Given::NOTHING, finishing=None
        ),
        text_signature = "($self, needed_blocks, policy='newest', *, candidates=None, priorities=None, cost=None, \
            spare_after=2, keep=1, left_out=(), finishing=None)"
    )]
    #[expect(clippy::too_many_arguments, reason = "options, by name")]
    fn choose_victims<'py>(
        &self,
        py: Python<'py>,
        needed_blocks: Given<'py>,
        policy: Given<'py>,
        candidates: Option<Bound<'py, PyAny>>,
        priorities: Option<Bound<'py, PyAny>>,
        cost: Option<Bound<'py, PyAny>>,
        spare_after: Given<'py>,
        keep: Given<'py>,
        left_out: Given<'py>,
        finishing: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let given = victims::Given {
            needed: &needed_blocks,
            policy: &policy,
            candidates: candidates.as_ref(),
            priorities: priorities.as_ref(),
            cost: cost.as_ref(),
            spare_after: &spare_after,
            keep: &keep,
            left_out: &left_out,
            finishing: finishing.as_ref(),
        };
        given.choose(py, &self.shared)
    }

    /// The last 256 preemptions, oldest first: a list of Preemption. Who, how, what came free, and what the caller said of it.
    fn preemptions<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        victims::preemptions(py, &self.shared)
    }

    /// Blocks and sequences by state, and counters since construction: a Stats. Changes nothing.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        let stats = self.shared.read(py, |pager| Ok(pager.stats()))?;
        let counters = stats.counters;
        let fields = PyDict::new(py);
        let gauges = [
            ("total_blocks", stats.total_blocks),
            ("free_blocks", stats.free_blocks),
            ("cached_blocks", stats.cached_blocks),
            ("active_blocks", stats.active_blocks),
            ("reserved_blocks", stats.reserved_blocks),
            ("evictable_blocks", stats.evictable_blocks),
            ("running_sequences", stats.running_sequences),
            ("preempted_sequences", stats.preempted_sequences),
            ("writing_blocks", stats.writing_blocks),
            ("quarantined_blocks", stats.quarantined_blocks),
            ("host_total_blocks", stats.host.total_blocks),
            ("host_free_blocks", stats.host.free_blocks),
            ("host_cached_blocks", stats.host.cached_blocks),
            ("host_active_blocks", stats.host.active_blocks),
            ("host_writing_blocks", stats.host.writing_blocks),
            ("host_quarantined_blocks", stats.host.quarantined_blocks),
            ("swapped_sequences", stats.swapped_sequences),
        ];
        for (name, value) in gauges {
            fields.set_item(name, value)?;
        }
        let rest = [
            ("clock_ticks", counters.clock_ticks),
            ("refused_calls", counters.refused_calls),
            ("noop_calls", counters.noop_calls),
            ("host_evicted_blocks", stats.host.evicted_blocks),
            ("offloaded_blocks", counters.offloaded_blocks),
            ("fetched_blocks", counters.fetched_blocks),
            ("swap_outs", counters.swap_outs),
            ("swap_ins", counters.swap_ins),
            ("saved_blocks", counters.saved_blocks),
            ("loaded_blocks", counters.loaded_blocks),
            ("late_reports", counters.late_reports),
            ("computed_tokens", counters.computed_tokens),
            ("finished_sequences", counters.finished_sequences),
            ("swapped_tokens", counters.swapped_tokens),
            ("refaulted_blocks", counters.refaulted_blocks),
            ("refault_distance", counters.refault_distance),
        ];
        for (name, value) in counters.named().into_iter().chain(rest) {
            fields.set_item(name, value)?;
        }
        CLASS.import(py, "kvpager.types", "Stats")?.call((), Some(&fields))
    }

    /// `stats` in the text form of Prometheus, with what a Reading of `kvpager.Pressure` says, if one is given: str. `labels`
    /// go with every sample. See `kvpager.metrics`, which has the content type and the names. Changes nothing.
    #[pyo3(
        signature = (reading=None, *, labels=None),
        text_signature = "($self, reading=None, *, labels=None)"
    )]
    fn metrics<'py>(
        &self,
        py: Python<'py>,
        reading: Option<Bound<'py, PyAny>>,
        labels: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let options = PyDict::new(py);
        options.set_item("labels", labels)?;
        options.set_item("block_size", self.config.block_size)?;
        py.import("kvpager.metrics")?.call_method("exposition", (self.stats(py)?, reading), Some(&options))
    }

    /// Recount everything; a list of violated promises, each with its id (I1..I14), empty if all is well. For tests:
    /// it is slow.
    fn check(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.shared.look(py, |pager| {
            pager.flush_rows();
            check::check(pager)
        })
    }

    /// The prefix tree drawn as text. `full=True` adds the free stack, the policy's queues, sequences, queued copies
    /// and statistics. Independent of the seed: two pagers that got the same calls draw the same.
    #[pyo3(signature = (full=false))]
    fn dump<'py>(&self, py: Python<'py>, full: bool) -> PyResult<Bound<'py, PyString>> {
        let text = self.shared.look(py, |pager| {
            pager.flush_rows();
            dump::dump(pager, full)
        })?;
        // Unlike `new`, this does not panic where there is no room for the text a second time.
        PyString::from_bytes(py, text.as_bytes()).map_err(|_| errors::allocation_error(py))
    }
}

fn computing_of(py: Python<'_>, computing: Computing) -> PyResult<Bound<'_, PyAny>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    CLASS.import(py, "kvpager.types", "Computing")?.call1((computing.sequence, computing.num_tokens))
}

impl PyPager {
    /// The attached tiers, held up. (In the child of a fork nobody lets go of a lock any more: an error, and no wait.)
    fn held_tiers<'py>(&self, py: Python<'py>) -> PyResult<Held<'py>> {
        self.shared.change(py, |_| Ok(()))?;
        self.attached.held(py)
    }

    /// A report of a plan, if it is this pager's.
    fn report(
        &self,
        py: Python<'_>,
        plan: &Reported,
        call: impl FnOnce(&mut Pager, PlanId) -> Result<bool, Error>,
    ) -> PyResult<bool> {
        self.shared.change(py, |pager| {
            plan.check(pager)?;
            call(pager, plan.id)
        })
    }

    pub fn panic_for_tests(&self, py: Python<'_>) -> PyResult<()> {
        self.shared.change(py, |_| panic!("kvpager: a panic that a test asked for"))
    }

    pub fn hold_lock_for_tests(&self, py: Python<'_>, seconds: f64) -> PyResult<()> {
        self.shared.hold_for_tests(py, std::time::Duration::try_from_secs_f64(seconds.min(60.0)).unwrap_or_default())
    }
}

/// What a call says of a prompt: its tokens, its namespace, and whether it is only held.
pub(crate) fn request(
    py: Python<'_>,
    tokens: &Bound<'_, PyAny>,
    namespace: &Given<'_>,
    pin: &Given<'_>,
) -> PyResult<(Tokens, Vec<u8>, bool)> {
    let namespace = namespace::encode(py, namespace)?;
    let pin = pin.flag("pin", false)?;
    Ok((Tokens::from_any(tokens)?, namespace, pin))
}

/// What an admission wishes.
pub(crate) fn wished(
    py: Python<'_>,
    shared: &Shared,
    request: (Tokens, Vec<u8>, bool),
    wait: &Given<'_>,
    fetch: &Given<'_>,
    fetch_min_tokens: &Given<'_>,
) -> PyResult<(Tokens, Vec<u8>, Wish)> {
    let (tokens, namespace, pinned) = request;
    let (wait, least) = (wait.flag("wait", false)?, fetch_min_tokens.count("fetch_min_tokens", 1)?);
    let policy = match fetch.get() {
        Some(policy) if !is_bool(policy)? => policy
            .getattr_opt("should_fetch")?
            .ok_or_else(|| wrong_type(policy, "fetch", "a bool, or an object with the method should_fetch"))
            .map(Some)?,
        _ => None,
    };
    let fetch = match policy {
        Some(should_fetch) => {
            let (on_device, on_host) = shared.read_with(py, &tokens, |pager, tokens| {
                let found = pager.find_prefix(tokens, &namespace)?.num_tokens;
                Ok((found, pager.num_host_tokens(tokens, &namespace, found)))
            })?;
            on_host > 0 && should_fetch.call1((on_device, on_host))?.is_truthy()?
        }
        None => fetch.flag("fetch", false)?,
    };
    Ok((tokens, namespace, Wish { pinned, wait, fetch: fetch.then_some(least) }))
}

/// What an admission came to.
pub(crate) fn started_of<'py>(py: Python<'py>, shared: &Arc<Shared>, started: Admitted) -> PyResult<Bound<'py, PyAny>> {
    match started {
        Admitted::Sequence(handle) => Ok(Bound::new(py, PySequence::new(shared, handle))?.into_any()),
        Admitted::Computing(computing) => computing_of(py, computing),
    }
}

fn random_seed(py: Python<'_>) -> PyResult<u64> {
    let bytes: [u8; 8] = py.import("os")?.call_method1("urandom", (8,))?.extract()?;
    Ok(u64::from_le_bytes(bytes))
}
