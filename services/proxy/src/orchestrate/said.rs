//! What of an answer has gone out: as much as another PD worker needs to go on with it.

use triptych_core::Failure;
use triptych_proto::convert::finish_reason;
use triptych_proto::v1;

/// What has gone out of every answer to a request, by place. Bounded by what answers may have.
#[derive(Debug)]
pub(super) struct Said(Vec<v1::ResumedChoice>);

impl Said {
    /// Nothing, of so many answers.
    pub(super) fn nothing(n_choices: u32) -> Self {
        let choice = |choice| v1::ResumedChoice { choice, ..v1::ResumedChoice::default() };
        Self((0..n_choices).map(choice).collect())
    }

    /// Takes note of a piece that is about to go out.
    ///
    /// # Errors
    /// Internal, for a piece of an answer that nobody asked for, or of one that has ended.
    pub(super) fn note(&mut self, delta: &v1::Delta) -> Result<(), Failure> {
        let ends = finish_reason(delta.finish_reason).map_err(Failure::internal)?.is_some();
        let n = self.0.len();
        let Some(said) = self.0.get_mut(delta.choice as usize) else {
            return Err(Failure::internal(format!("a PD worker wrote answer {} of {n}", delta.choice)));
        };
        if said.ended {
            let text = format!("a PD worker went on with answer {}, which had ended", delta.choice);
            return Err(Failure::internal(text));
        }
        said.token_ids.extend(&delta.token_ids);
        said.text_len += delta.text.len() as u64;
        said.segments = said.segments.saturating_add(u32::try_from(delta.segments.len()).unwrap_or(u32::MAX));
        said.ended = ends;
        Ok(())
    }

    /// The answers of which anything has gone out, as a PD worker is told of them.
    pub(super) fn resume(&self) -> Vec<v1::ResumedChoice> {
        let began = |said: &&v1::ResumedChoice| {
            said.ended || said.text_len > 0 || said.segments > 0 || !said.token_ids.is_empty()
        };
        self.0.iter().filter(began).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_add_up_by_answer_and_untouched_answers_are_not_told() {
        let mut said = Said::nothing(3);
        let piece = |choice, token, text: &str| v1::Delta {
            choice,
            token_ids: vec![token],
            text: text.into(),
            ..v1::Delta::default()
        };
        said.note(&piece(2, 7, "é")).unwrap();
        said.note(&piece(0, 8, "")).unwrap();
        let end = v1::Delta { finish_reason: v1::FinishReason::Stop.into(), ..piece(2, 9, "b") };
        said.note(&end).unwrap();
        let resume = said.resume();
        assert_eq!(resume.len(), 2);
        assert_eq!(
            (resume[0].token_ids.as_slice(), resume[0].text_len, resume[0].ended),
            (&[8][..], 0, false)
        );
        assert_eq!(
            (resume[1].token_ids.as_slice(), resume[1].text_len, resume[1].ended),
            (&[7, 9][..], 3, true)
        );
        assert!(said.note(&piece(2, 1, "more")).is_err(), "it had ended");
        assert!(said.note(&piece(3, 1, "")).is_err(), "nobody asked for it");
    }
}
