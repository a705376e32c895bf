//! `kvpager.Pager`.

use std::sync::Arc;

use kvpager_core::batch::{BUFFERS_LIMITS, COUNT_LIMITS, MAX_SEQS_LIMITS, Shape};
use kvpager_core::config::{BLOCK_SIZE_LIMITS, Config, NUM_BLOCKS_LIMITS};
use kvpager_core::ids::{BlockId, Token};
use kvpager_core::pager::{Admitted, Computing};
use kvpager_core::{Pager, check, dump};
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict, PyString, PyType};

use crate::arguments::Given;
use crate::batch::PyBatch;
use crate::errors;
use crate::namespace;
use crate::sequence::PySequence;
use crate::shared::{Shared, none_if_full};
use crate::tokens::Tokens;

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
}

#[pymethods]
impl PyPager {
    #[new]
    #[pyo3(
        signature = (
            num_blocks, block_size=Given::NOTHING, *, policy=Given::NOTHING, watermark=Given::NOTHING,
            identity=Given::NOTHING, seed=None, null_block=Given::NOTHING, prefix_cache=Given::NOTHING
        ),
        text_signature = "(num_blocks, block_size=16, *, policy='lru', watermark=0.0, identity=b'', seed=None, \
            null_block=False, prefix_cache=True)"
    )]
    #[expect(clippy::too_many_arguments, reason = "settings, by name")]
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
        };
        let pager = Pager::new(config.clone()).map_err(to_python)?;
        Ok(Self { shared: Arc::new(Shared::new(pager)), config })
    }

    // Without the seed, which is secret: reprs end up in logs.
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let truth = |value| if value { "True" } else { "False" };
        let Config { num_blocks, block_size, watermark, .. } = self.config;
        Ok(format!(
            "kvpager.Pager(num_blocks={num_blocks}, block_size={block_size}, policy='{}', watermark={watermark:?}, identity={}, null_block={}, prefix_cache={})",
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
        signature = (prompt, *, namespace=Given::NOTHING, pin=Given::NOTHING, wait=Given::NOTHING),
        text_signature = "($self, prompt, *, namespace=b'', pin=False, wait=False)"
    )]
    fn admit<'py>(
        &self,
        py: Python<'py>,
        prompt: &Bound<'py, PyAny>,
        namespace: Given<'py>,
        pin: Given<'py>,
        wait: Given<'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (tokens, namespace, pin) = self.shared.arguments(py, request(py, prompt, &namespace, &pin))?;
        let wait = self.shared.arguments(py, wait.flag("wait", false))?;
        let started =
            self.shared.change_with(py, &tokens, |pager, tokens| start(pager, tokens, &namespace, pin, wait))?;
        self.started(py, started)
    }

    /// As `admit`, but None where that raises OutOfBlocks. A prompt that can never fit still raises NeverFits:
    /// waiting would be for ever.
    #[pyo3(
        signature = (prompt, *, namespace=Given::NOTHING, pin=Given::NOTHING, wait=Given::NOTHING),
        text_signature = "($self, prompt, *, namespace=b'', pin=False, wait=False)"
    )]
    fn try_admit<'py>(
        &self,
        py: Python<'py>,
        prompt: &Bound<'py, PyAny>,
        namespace: Given<'py>,
        pin: Given<'py>,
        wait: Given<'py>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let (tokens, namespace, pin) = self.shared.arguments(py, request(py, prompt, &namespace, &pin))?;
        let wait = self.shared.arguments(py, wait.flag("wait", false))?;
        let started = self
            .shared
            .change_with(py, &tokens, |pager, tokens| none_if_full(start(pager, tokens, &namespace, pin, wait)))?;
        started.map(|started| self.started(py, started)).transpose()
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

    /// What an `admit` of this prompt would hit now: a PrefixMatch with `num_tokens`, `num_blocks`, and `computing`, who
    /// is about to compute what follows. A peek: no
    /// recency, no statistic changes, no dropped handle is released. Raises TokenError and TokenTypeError as `admit`
    /// does. Cost: comparing the cached tokens.
    #[pyo3(name = "r#match", signature = (prompt, *, namespace=Given::NOTHING), text_signature = "($self, prompt, *, namespace=b'')")]
    fn find<'py>(
        &self,
        py: Python<'py>,
        prompt: &Bound<'py, PyAny>,
        namespace: Given<'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        let (tokens, namespace, _) = request(py, prompt, &namespace, &Given::NOTHING)?;
        let found = self.shared.read_with(py, &tokens, |pager, tokens| pager.find_prefix(tokens, &namespace))?;
        let computing = found.computing.map(|computing| computing_of(py, computing)).transpose()?;
        CLASS.import(py, "kvpager.types", "PrefixMatch")?.call1((found.num_tokens, found.num_blocks, computing))
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

    /// Nothing cached so far can hit again (new weights, say). Cached blocks are free at once; running sequences go
    /// on, publish nothing more, and free their blocks at release. `identity` replaces the pager's. ConfigError if
    /// it is too long. Cost: the same for every pool.
    #[pyo3(signature = (identity=None))]
    fn reset(&self, py: Python<'_>, identity: Option<Given<'_>>) -> PyResult<()> {
        let identity = identity.as_ref().map(|identity| identity.bytes("identity")).transpose();
        let identity = self.shared.arguments(py, identity)?.flatten().map(<[u8]>::to_vec);
        self.shared.change(py, |pager| pager.reset(identity))
    }

    /// Drop the last of the given blocks, and all that is indexed below it, from the index; returns how many blocks
    /// those were, 0 if the path is not indexed. Sequences whose path it was go on, but publish nothing more.
    /// ValueError unless `tokens` are a whole number of blocks, at least one. Cost: what is dropped.
    #[pyo3(signature = (tokens, *, namespace=Given::NOTHING), text_signature = "($self, tokens, *, namespace=b'')")]
    fn forget(&self, py: Python<'_>, tokens: &Bound<'_, PyAny>, namespace: Given<'_>) -> PyResult<usize> {
        let (tokens, namespace, _) = self.shared.arguments(py, request(py, tokens, &namespace, &Given::NOTHING))?;
        self.shared.change_with(py, &tokens, |pager, tokens| pager.forget(tokens, &namespace))
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
        ];
        for (name, value) in gauges {
            fields.set_item(name, value)?;
        }
        let rest = [
            ("clock_ticks", counters.clock_ticks),
            ("refused_calls", counters.refused_calls),
            ("noop_calls", counters.noop_calls),
        ];
        for (name, value) in counters.named().into_iter().chain(rest) {
            fields.set_item(name, value)?;
        }
        CLASS.import(py, "kvpager.types", "Stats")?.call((), Some(&fields))
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

fn start(
    pager: &mut Pager,
    tokens: &[Token],
    namespace: &[u8],
    pin: bool,
    wait: bool,
) -> Result<Admitted, kvpager_core::Error> {
    if wait {
        return pager.admit_or_wait(tokens, namespace, pin);
    }
    pager.admit(tokens, namespace, pin).map(Admitted::Sequence)
}

fn computing_of(py: Python<'_>, computing: Computing) -> PyResult<Bound<'_, PyAny>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    CLASS.import(py, "kvpager.types", "Computing")?.call1((computing.sequence, computing.num_tokens))
}

impl PyPager {
    fn started<'py>(&self, py: Python<'py>, started: Admitted) -> PyResult<Bound<'py, PyAny>> {
        match started {
            Admitted::Sequence(handle) => Ok(Bound::new(py, PySequence::new(&self.shared, handle))?.into_any()),
            Admitted::Computing(computing) => computing_of(py, computing),
        }
    }

    pub fn panic_for_tests(&self, py: Python<'_>) -> PyResult<()> {
        self.shared.change(py, |_| panic!("kvpager: a panic that a test asked for"))
    }

    pub fn hold_lock_for_tests(&self, py: Python<'_>, seconds: f64) -> PyResult<()> {
        self.shared.hold_for_tests(py, std::time::Duration::try_from_secs_f64(seconds.min(60.0)).unwrap_or_default())
    }
}

/// What a call says of a prompt: its tokens, its namespace, and whether it is only held.
fn request(
    py: Python<'_>,
    tokens: &Bound<'_, PyAny>,
    namespace: &Given<'_>,
    pin: &Given<'_>,
) -> PyResult<(Tokens, Vec<u8>, bool)> {
    let namespace = namespace::encode(py, namespace)?;
    let pin = pin.flag("pin", false)?;
    Ok((Tokens::from_any(tokens)?, namespace, pin))
}

fn random_seed(py: Python<'_>) -> PyResult<u64> {
    let bytes: [u8; 8] = py.import("os")?.call_method1("urandom", (8,))?.extract()?;
    Ok(u64::from_le_bytes(bytes))
}
