//! The overload cases, the load and the report.
