//! Plans as Python has them: `kvpager.plans.Plan`, in and out.
//!
//! A plan that goes in is read before the pager's lock is taken. Its number and generation name it; its kind and blocks
//! must be those that the pager has under that name, or it is another pager's. One that comes out is copied under the lock
//! and built after it.

use kvpager_core::digest::{Digest, Records};
use kvpager_core::ids::BlockId;
use kvpager_core::memory::with_capacity;
use kvpager_core::transfers::{Plan, PlanId, PlanState, Tier};
use kvpager_core::{Error, Pager};
use numpy::{PyArray1, PyArrayDescr, PyArrayMethods};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyInt, PyList, PyMemoryView, PySequence, PyString, PyTuple, PyType};

use crate::arguments::{is_bool, wrong_type};
use crate::buffers::{copied, read_only};
use crate::errors::{lost_plan, shown, to_python};

fn plan_class(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    CLASS.import(py, "kvpager.plans", "Plan")
}

// ---- in ------------------------------------------------------------------------------------------------------------

/// A plan that somebody reports on.
pub struct Reported {
    /// Its name.
    pub id: PlanId,
    kind: String,
    sources: Vec<i32>,
    targets: Vec<i32>,
}

impl Reported {
    /// What an argument says.
    pub fn of(plan: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = plan.py();
        if !plan.is_instance(plan_class(py)?)? {
            return Err(wrong_type(plan, "plan", "a kvpager.Plan"));
        }
        let number = word(&plan.getattr(intern!(py, "id"))?, "id")?;
        let generation = word(&plan.getattr(intern!(py, "generation"))?, "generation")?;
        let kind = plan.getattr(intern!(py, "kind"))?;
        let kind = kind.extract().map_err(|_| wrong_type(&kind, "plan.kind", "a str"))?;
        let sources = ids(&plan.getattr(intern!(py, "source_ids"))?, "source_ids")?;
        let targets = ids(&plan.getattr(intern!(py, "destination_ids"))?, "destination_ids")?;
        Ok(Self { id: PlanId { number, generation }, kind, sources, targets })
    }

    /// Is it this pager's plan of that name? (Of one that has ended nobody knows more than the name.)
    ///
    /// # Errors
    /// `Value` if not.
    pub fn check(&self, pager: &Pager) -> Result<(), Error> {
        let Some(plan) = pager.find_plan(self.id)? else { return Ok(()) };
        let is_same = |ours: &[BlockId], theirs: &[i32]| {
            ours.len() == theirs.len() && ours.iter().zip(theirs).all(|(&ours, &theirs)| ours.cast_signed() == theirs)
        };
        if self.kind == plan.work.name()
            && is_same(&plan.sources, &self.sources)
            && is_same(&plan.targets, &self.targets)
        {
            return Ok(());
        }
        Err(Error::Value(format!(
            "this pager's plan {} of generation {} is another {} of {} blocks: report a plan to the pager that made it",
            self.id.number,
            self.id.generation,
            plan.work.name(),
            plan.targets.len()
        )))
    }
}

fn ids(value: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<i32>> {
    match value.cast::<PyArray1<i32>>() {
        Ok(array) => copied(array),
        Err(_) => Err(wrong_type(value, &format!("plan.{name}"), "a one-dimensional int32 array")),
    }
}

fn word(value: &Bound<'_, PyAny>, name: &str) -> PyResult<u32> {
    if value.is_instance_of::<PyInt>()
        && !value.is_instance_of::<PyBool>()
        && let Ok(word) = value.extract()
    {
        return Ok(word);
    }
    let shown = shown(value)?;
    Err(PyValueError::new_err(format!("plan.{name} is {shown}; it must be an int, 0 to 4294967295")))
}

/// Which blocks of a plan arrived: bools in a sequence, or bools or integers in a buffer.
pub fn mask(done: &Bound<'_, PyAny>) -> PyResult<Vec<bool>> {
    // A tuple cannot change while an item is looked at.
    if let Ok(list) = done.cast::<PyList>() {
        return from_items(&list.as_sequence().to_tuple()?);
    }
    if let Ok(tuple) = done.cast::<PyTuple>() {
        return from_items(tuple);
    }
    if let Ok(view) = PyMemoryView::from(done) {
        return from_buffer(&view);
    }
    // Text says of itself that it is a sequence, and so does a view that was released.
    if let Ok(sequence) = done.cast::<PySequence>()
        && !done.is_instance_of::<PyString>()
        && !done.is_instance_of::<PyMemoryView>()
    {
        return from_items(&sequence.to_tuple()?);
    }
    Err(wrong_type(done, "done", "a sequence of bools, or a buffer of bools or integers"))
}

fn from_items(items: &Bound<'_, PyTuple>) -> PyResult<Vec<bool>> {
    let mut mask = with_capacity(items.len()).map_err(|error| to_python(items.py(), error))?;
    for (position, item) in items.iter_borrowed().enumerate() {
        if !is_bool(&item)? {
            let shown = shown(&item)?;
            return Err(PyTypeError::new_err(format!("done at position {position} must be a bool, not {shown}")));
        }
        mask.push(item.is_truthy()?);
    }
    Ok(mask)
}

fn from_buffer(view: &Bound<'_, PyMemoryView>) -> PyResult<Vec<bool>> {
    let py = view.py();
    let refused = |what: String| Err(PyTypeError::new_err(format!("done must be bools or integers, not {what}")));
    let array = py.import("numpy")?.call_method1("asarray", (view,))?;
    let data_type = array.getattr("dtype")?;
    if !matches!(data_type.getattr("kind")?.extract::<String>()?.as_str(), "b" | "i" | "u") {
        return refused(format!("a buffer of {data_type}"));
    }
    let dimensions: usize = array.getattr("ndim")?.extract()?;
    if dimensions != 1 {
        return refused(format!("a buffer of {dimensions} dimensions"));
    }
    let plain = array.call_method1("astype", (PyArrayDescr::of::<bool>(py),))?;
    let bytes = copied(plain.call_method1("view", (PyArrayDescr::of::<u8>(py),))?.cast::<PyArray1<u8>>()?)?;
    let mut mask = with_capacity(bytes.len()).map_err(|error| to_python(py, error))?;
    mask.extend(bytes.iter().map(|&byte| byte != 0));
    Ok(mask)
}

// ---- out -----------------------------------------------------------------------------------------------------------

/// What Python is told of a plan.
pub struct Told {
    id: PlanId,
    kind: &'static str,
    source: Tier,
    target: Tier,
    sources: Vec<i32>,
    targets: Vec<i32>,
    records: Option<ToldKeys>,
}

impl Told {
    /// What there is to tell of a plan.
    ///
    /// # Errors
    /// `Memory` if the allocator refuses.
    pub fn of(plan: &Plan) -> Result<Self, Error> {
        let Plan { id, sources, targets, work, .. } = plan;
        let (kind, source, target) = (work.name(), work.source(), work.target());
        let records =
            work.records().map(|records| ToldKeys::of(records, records.metas.len() / sources.len())).transpose()?;
        Ok(Self { id: *id, kind, source, target, sources: signed(sources)?, targets: signed(targets)?, records })
    }

    /// A `kvpager.Plan`.
    pub fn build(self, py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
        let word = |word| PyString::intern(py, word);
        plan_class(py)?.call1((
            self.id.number,
            self.id.generation,
            word(self.kind),
            word(self.source.name()),
            read_only(py, self.sources),
            word(self.target.name()),
            read_only(py, self.targets),
            self.records.map(|records| records.build(py)).transpose()?,
        ))
    }

    /// A `kvpager.PlanStatus`.
    pub fn with_state(self, py: Python<'_>, state: PlanState) -> PyResult<Bound<'_, PyAny>> {
        static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        CLASS.import(py, "kvpager.plans", "PlanStatus")?.call1((self.build(py)?, state.name(), state.tick()))
    }
}

/// What Python is told of blocks in a store.
pub struct ToldKeys {
    keys: Vec<Digest>,
    metas: Vec<u8>,
    width: usize,
}

impl ToldKeys {
    /// A copy. Each block's meta has so many bytes.
    ///
    /// # Errors
    /// `Memory` if the allocator refuses.
    pub fn of(records: &Records, width: usize) -> Result<Self, Error> {
        let (keys, metas) = (with_capacity(records.keys.len())?, with_capacity(records.metas.len())?);
        let mut copy = Self { keys, metas, width };
        copy.keys.extend_from_slice(&records.keys);
        copy.metas.extend_from_slice(&records.metas);
        Ok(copy)
    }

    /// A `kvpager.StoreKeys`.
    pub fn build(self, py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
        static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        let blocks = self.keys.len();
        let keys = read_only(py, self.keys.into_flattened()).reshape([blocks, size_of::<Digest>()])?;
        let metas = read_only(py, self.metas).reshape([blocks, self.width])?;
        CLASS.import(py, "kvpager.plans", "StoreKeys")?.call1((keys, metas))
    }
}

/// A plan that a call has just made. Where the allocator refuses to tell of it, it is there nevertheless.
pub struct Made(Option<Told>);

impl Made {
    /// The plan of this name.
    pub fn of(pager: &Pager, id: PlanId) -> Self {
        Self(pager.find_plan(id).ok().flatten().and_then(|plan| Told::of(plan).ok()))
    }

    /// A `kvpager.Plan`.
    pub fn build(self, py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
        self.0.ok_or_else(|| lost_plan(py))?.build(py)
    }
}

fn signed(ids: &[BlockId]) -> Result<Vec<i32>, Error> {
    let mut signed = with_capacity(ids.len())?;
    signed.extend(ids.iter().copied().map(BlockId::cast_signed));
    Ok(signed)
}
