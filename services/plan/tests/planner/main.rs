//! What the planner answers where the right answer is known, on curves made by hand; and a profile of real models.
#![forbid(unsafe_code)]

mod answers;
mod profile;
