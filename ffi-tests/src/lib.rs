//! Tests of the C ABI; see `tests/`.
