//! The planner's parts from outside: curves, and the simulator on clusters that are small enough to be understood.

mod accounting;
mod costs;
mod elastic;
mod first_images;
mod interference;
mod made;
mod maps;
mod papers;
mod queues;
mod rules;
mod speed;
mod towers;
