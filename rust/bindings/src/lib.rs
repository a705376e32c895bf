//! kvpager's Python extension: argument shaping, one lock, numpy in and out, errors. No algorithm lives here.

// PyO3's conversions of self and arguments are by value where clippy would prefer references.
#![allow(clippy::needless_pass_by_value)]
// Doc comments of Python items are Python docstrings, in numpydoc's form.
#![allow(clippy::doc_markdown)]

mod admission;
mod arguments;
mod attached;
mod batch;
mod buffers;
mod errors;
mod integers;
mod namespace;
mod pager;
mod plans;
mod replay;
mod sequence;
mod shared;
mod step;
mod store;
mod tokens;
mod victims;

use pyo3::prelude::*;

/// The compiled part of kvpager. Import `kvpager` instead.
#[pymodule]
mod _core {
    use numpy::{PyArray1, PyArrayMethods};
    use pyo3::prelude::*;
    use pyo3::types::PyDict;

    #[pymodule_export]
    use super::admission::PyAdmission;
    #[pymodule_export]
    use super::batch::PyBatch;
    #[pymodule_export]
    use super::pager::PyPager;
    #[pymodule_export]
    use super::replay::PyReplay;
    #[pymodule_export]
    use super::sequence::PySequence;
    #[pymodule_export]
    use super::step::PyStep;
    #[pymodule_export]
    use super::store::{PyLogStore, inspect_segment, inspect_store};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        load_numpy(module.py())?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }

    /// Loads what numpy's crate would load at the first array: it panics if a KeyboardInterrupt falls into that.
    fn load_numpy(py: Python<'_>) -> PyResult<()> {
        py.import("numpy")?;
        let _ = PyArray1::<i32>::zeros(py, 1, false).try_readwrite();
        Ok(())
    }

    /// How this extension was built: `version`, `debug` (unoptimised?), `target`, `abi`.
    #[pyfunction]
    fn build_info(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
        let info = PyDict::new(py);
        info.set_item("version", env!("CARGO_PKG_VERSION"))?;
        info.set_item("debug", cfg!(debug_assertions))?;
        info.set_item("target", format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS))?;
        info.set_item("abi", "abi3-py311")?;
        Ok(info)
    }

    /// Panics inside a call on this pager, so that the tests can see what a bug would do.
    #[pyfunction]
    fn _panic_for_tests(py: Python<'_>, pager: &PyPager) -> PyResult<()> {
        pager.panic_for_tests(py)
    }

    /// Keeps this pager's lock while other threads run, so that the tests can see calls wait.
    #[pyfunction]
    fn _hold_lock_for_tests(py: Python<'_>, pager: &PyPager, seconds: f64) -> PyResult<()> {
        pager.hold_lock_for_tests(py, seconds)
    }

    /// Called in the child after `os.fork()`: pagers and stores made before are refused from now on.
    #[pyfunction]
    fn _mark_forked() {
        super::shared::mark_forked();
        super::store::mark_forked();
    }
}
