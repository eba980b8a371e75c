//! Recommendations of the planner for known optima, on synthetic curves; and a profile of real models.
#![forbid(unsafe_code)]

mod answers;
mod profile;
