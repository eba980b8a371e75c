//! An answer as it comes, for the API that the request came from.

use tokio::sync::{mpsc, oneshot};
use triptych_core::{Failure, ModelName, RequestId};
use triptych_proto::v1;

/// Pieces of an answer that may wait for a slow reader before the PD worker's stream is left to wait too.
pub(super) const READ_AHEAD: usize = 64;

/// A piece of an answer.
#[derive(Clone, Debug)]
pub enum Piece {
    /// New text.
    Delta(v1::Delta),
    /// The end.
    Summary(v1::Summary),
}

/// An answer as it comes. Dropping it ends the work on it.
#[derive(Debug)]
pub struct Answer {
    /// The request.
    pub request_id: RequestId,
    /// The model that answers.
    pub model: ModelName,
    pub(super) pieces: mpsc::Receiver<v1::Delta>,
    /// Its end, kept for a reader that is behind.
    pub(super) end: Option<oneshot::Receiver<Result<v1::Summary, Failure>>>,
}

impl Answer {
    /// The next piece. After a summary or a failure there is none; before, there always is one.
    pub async fn next(&mut self) -> Option<Result<Piece, Failure>> {
        let end = self.end.as_mut()?;
        if let Some(delta) = self.pieces.recv().await {
            return Some(Ok(Piece::Delta(delta)));
        }
        let lost = |_| Err(Failure::internal("the task of a request ended without a word"));
        let end = end.await.unwrap_or_else(lost);
        self.end = None;
        Some(end.map(Piece::Summary))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use triptych_core::FailureClass;

    fn answer() -> (mpsc::Sender<v1::Delta>, oneshot::Sender<Result<v1::Summary, Failure>>, Answer) {
        let ((sender, pieces), (ends, end)) = (mpsc::channel(2), oneshot::channel());
        let request_id = RequestId::from_bits(1);
        (sender, ends, Answer { request_id, model: ModelName::new("m"), pieces, end: Some(end) })
    }

    #[tokio::test]
    async fn a_reader_that_is_behind_finds_the_end_behind_what_it_has_still_to_read() {
        for ends_well in [true, false] {
            let (sender, ends, mut answer) = answer();
            sender.try_send(v1::Delta::default()).unwrap();
            sender.try_send(v1::Delta::default()).unwrap();
            let end = if ends_well { Ok(v1::Summary::default()) } else { Err(Failure::unavailable("gone")) };
            ends.send(end).unwrap();
            drop(sender);
            for _ in 0..2 {
                assert!(matches!(answer.next().await, Some(Ok(Piece::Delta(_)))));
            }
            match answer.next().await {
                Some(Ok(Piece::Summary(_))) => assert!(ends_well),
                Some(Err(failure)) => assert!(!ends_well && failure.message == "gone"),
                other => panic!("{other:?}"),
            }
            assert!(answer.next().await.is_none(), "it ends once");
        }
    }

    #[tokio::test]
    async fn a_task_that_is_gone_ends_its_answer_with_a_failure() {
        let (sender, ends, mut answer) = answer();
        drop((sender, ends));
        let failure = answer.next().await.unwrap().unwrap_err();
        assert_eq!(failure.class, FailureClass::Internal);
        assert!(answer.next().await.is_none());
    }
}
