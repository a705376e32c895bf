//! The disk store as Python has it. `kvpager.tiers.DiskStore` checks arguments and says what they are; what memory
//! safety needs is checked here again. No call holds the interpreter while it waits for a lock or the disk.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, Weak};

use kvpager_store::{Error, KEY_BYTES, Keys, LogStore, SegmentReport, Settings, SyncPolicy};
use numpy::PyArray1;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::buffers::{ByteRows, copied};
use crate::errors;
use crate::shared::forks;

/// Stores of this process.
static OPEN: Mutex<Vec<Weak<LogStore>>> = Mutex::new(Vec::new());

/// This process is a child now: it keeps no directory of its parent from others.
pub fn mark_forked() {
    if let Ok(mut open) = OPEN.try_lock() {
        for store in open.drain(..).filter_map(|store| store.upgrade()) {
            store.abandon();
            // The last owner would close it, which is the parent's affair.
            std::mem::forget(store);
        }
    }
}

/// A store in a directory. Use `kvpager.tiers.DiskStore` instead.
#[pyclass(frozen, name = "LogStore", module = "kvpager._core")]
pub struct PyLogStore {
    store: Option<Arc<LogStore>>,
    forks: u64,
}

impl Drop for PyLogStore {
    fn drop(&mut self) {
        if forks() != self.forks {
            std::mem::forget(self.store.take());
        }
    }
}

impl PyLogStore {
    fn run<R: Send>(&self, py: Python<'_>, call: impl FnOnce(&LogStore) -> Result<R, Error> + Send) -> PyResult<R> {
        let Some(store) = self.store.as_ref().filter(|_| forks() == self.forks) else {
            return Err(errors::forked(py));
        };
        detached(py, || call(store))
    }
}

fn detached<R: Send>(py: Python<'_>, call: impl FnOnce() -> Result<R, Error> + Send) -> PyResult<R> {
    match catch_unwind(AssertUnwindSafe(|| py.detach(call))) {
        Ok(answer) => answer.map_err(|error| errors::of_store(py, error)),
        Err(_) => Err(errors::poisoned(py)),
    }
}

/// Keys, metas and row ids of a call, copied.
struct Records {
    keys: Vec<[u8; KEY_BYTES]>,
    metas: Vec<u8>,
    row_ids: Vec<usize>,
    rows: ByteRows,
}

fn keys_of(keys: &Bound<'_, PyArray1<u8>>) -> PyResult<Vec<[u8; KEY_BYTES]>> {
    let bytes = copied(keys)?;
    let (keys, []) = bytes.as_chunks::<KEY_BYTES>() else {
        return Err(PyValueError::new_err(format!("keys have {} bytes, no multiple of {KEY_BYTES}", bytes.len())));
    };
    Ok(keys.to_vec())
}

impl Records {
    fn of(
        store: &PyLogStore,
        keys: &Bound<'_, PyArray1<u8>>,
        metas: &Bound<'_, PyArray1<u8>>,
        rows: &Bound<'_, PyAny>,
        row_ids: &Bound<'_, PyArray1<i32>>,
        writes: bool,
    ) -> PyResult<Self> {
        let py = rows.py();
        let Some(store) = store.store.as_ref() else { return Err(errors::forked(py)) };
        let (keys, metas, row_ids) = (keys_of(keys)?, copied(metas)?, copied(row_ids)?);
        let Some(rows) = ByteRows::of(rows, store.row_bytes(), writes) else {
            let kind = if writes { "writable " } else { "" };
            return Err(PyValueError::new_err(format!(
                "rows must be {kind}uint8 [num_rows, {}], C-contiguous",
                store.row_bytes()
            )));
        };
        if metas.len() != keys.len() * store.meta_bytes() || row_ids.len() != keys.len() {
            return Err(PyValueError::new_err(format!(
                "{} keys need {} bytes of metas and as many row ids, not {} and {}",
                keys.len(),
                keys.len() * store.meta_bytes(),
                metas.len(),
                row_ids.len()
            )));
        }
        let is_there = |row: &i32| usize::try_from(*row).is_ok_and(|row| row < rows.len());
        if let Some(row) = row_ids.iter().find(|row| !is_there(row)) {
            return Err(PyValueError::new_err(format!("row id {row} is outside 0..{}", rows.len())));
        }
        let row_ids = row_ids.into_iter().filter_map(|row| usize::try_from(row).ok()).collect();
        Ok(Self { keys, metas, row_ids, rows })
    }
}

#[pymethods]
impl PyLogStore {
    #[new]
    #[pyo3(signature = (path, row_bytes, meta_bytes, max_bytes, identity, sync, segment_bytes))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        row_bytes: usize,
        meta_bytes: usize,
        max_bytes: u64,
        identity: &[u8],
        sync: &str,
        segment_bytes: Option<u64>,
    ) -> PyResult<Self> {
        let Some(sync) = SyncPolicy::from_name(sync) else {
            return Err(errors::config_error(
                py,
                format!("sync is {sync:?}; it must be \"segment\", \"always\" or \"never\""),
            ));
        };
        let identity = identity.to_vec();
        let settings = Settings { directory: path, row_bytes, meta_bytes, max_bytes, identity, sync, segment_bytes };
        let store = Arc::new(detached(py, || LogStore::open(&settings))?);
        if let Ok(mut open) = OPEN.lock() {
            open.retain(|store| store.strong_count() > 0);
            open.push(Arc::downgrade(&store));
        }
        Ok(Self { store: Some(store), forks: forks() })
    }

    fn contains_many<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyArray1<u8>>,
    ) -> PyResult<Bound<'py, PyArray1<bool>>> {
        let keys = keys_of(keys)?;
        self.run(py, |store| store.contains_many(&keys)).map(|answers| PyArray1::from_vec(py, answers))
    }

    fn get_many<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyArray1<u8>>,
        metas: &Bound<'py, PyArray1<u8>>,
        rows: &Bound<'py, PyAny>,
        row_ids: &Bound<'py, PyArray1<i32>>,
    ) -> PyResult<Bound<'py, PyArray1<bool>>> {
        let mut records = Records::of(self, keys, metas, rows, row_ids, true)?;
        let Records { keys, metas, row_ids, rows } = &mut records;
        let answers = self.run(py, move |store| store.get_many(keys, metas, rows, row_ids))?;
        Ok(PyArray1::from_vec(py, answers))
    }

    fn put_many<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyArray1<u8>>,
        metas: &Bound<'py, PyArray1<u8>>,
        rows: &Bound<'py, PyAny>,
        row_ids: &Bound<'py, PyArray1<i32>>,
    ) -> PyResult<Bound<'py, PyArray1<bool>>> {
        let mut records = Records::of(self, keys, metas, rows, row_ids, false)?;
        let Records { keys, metas, row_ids, rows } = &mut records;
        let answers = self.run(py, move |store| store.put_many(keys, metas, rows, row_ids))?;
        Ok(PyArray1::from_vec(py, answers))
    }

    fn delete_many(&self, py: Python<'_>, keys: &Bound<'_, PyArray1<u8>>) -> PyResult<usize> {
        let keys = keys_of(keys)?;
        self.run(py, |store| store.delete_many(&keys))
    }

    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, LogStore::clear)
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, LogStore::close)
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.run(py, LogStore::stats)?;
        let dict = PyDict::new(py);
        for (name, value) in stats.named() {
            dict.set_item(name, value)?;
        }
        Ok(dict)
    }

    #[getter]
    fn segment_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        self.run(py, |store| Ok(store.segment_bytes()))
    }
}

/// What is in a store's directory: reads only, and may run beside its writer.
#[pyfunction]
pub fn inspect_store(py: Python<'_>, path: PathBuf) -> PyResult<Bound<'_, PyDict>> {
    let found = detached(py, || kvpager_store::inspect(&path))?;
    let dict = PyDict::new(py);
    dict.set_item("row_bytes", found.manifest.geometry.row_bytes)?;
    dict.set_item("meta_bytes", found.manifest.geometry.meta_bytes)?;
    dict.set_item("record_bytes", found.manifest.geometry.record_bytes())?;
    dict.set_item("identity", PyBytes::new(py, &found.manifest.identity))?;
    dict.set_item("bytes", found.bytes)?;
    dict.set_item("segments", found.segments)?;
    dict.set_item("foreign", found.foreign)?;
    Ok(dict)
}

/// What is in one of its segments; with `verify` every record is read and checked. None if it is not there any more.
#[pyfunction]
pub fn inspect_segment(
    py: Python<'_>,
    path: PathBuf,
    number: u64,
    verify: bool,
) -> PyResult<Option<Bound<'_, PyDict>>> {
    let report = detached(py, || {
        let geometry = kvpager_store::Manifest::read(&path)?.geometry;
        if verify {
            kvpager_store::verify(&path, geometry, number)
        } else {
            kvpager_store::look(&path, geometry, number)
        }
    })?;
    let is_unusable = report.as_ref().is_some_and(SegmentReport::is_unusable);
    let Some(SegmentReport { bytes, slots, records, deleted, damaged, unfinished_bytes, keys }) = report else {
        return Ok(None);
    };
    let dict = PyDict::new(py);
    dict.set_item("number", number)?;
    dict.set_item("bytes", bytes)?;
    dict.set_item("slots", slots)?;
    dict.set_item("unusable", is_unusable)?;
    dict.set_item("records", records)?;
    dict.set_item("deleted", deleted)?;
    dict.set_item("damaged", damaged)?;
    dict.set_item("unfinished_bytes", unfinished_bytes)?;
    let keys = match keys {
        Keys::Good => "good",
        Keys::Missing => "missing",
        Keys::Damaged => "damaged",
    };
    dict.set_item("keys", keys)?;
    Ok(Some(dict))
}
