//! Choosing tokens, as a decoder is asked for it: types of the op, and what the host does itself with whole rows.

pub use triptych_kernels::logits;
pub use triptych_kernels::ops::{
    CarriedToken, Choice, Choices, ChooseBatch, ChooseRow, Edit, SampleError, Sampling, TokenLogprobs,
    WholeRows, mask_of,
};
pub use triptych_kernels::sampling::{choose, choose_rows, log_softmax, logprobs};
