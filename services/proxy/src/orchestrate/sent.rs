//! The part of an answer that was sent: as much of it as another PD worker needs to go on.

use triptych_core::Failure;
use triptych_proto::convert::finish_reason;
use triptych_proto::v1;

/// The part that was sent of each choice of a request, by number. Bounded by what answers may have.
#[derive(Debug)]
pub(super) struct SentAnswer(Vec<v1::ResumedChoice>);

impl SentAnswer {
    /// Nothing, of so many choices.
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
        let Some(sent) = self.0.get_mut(delta.choice as usize) else {
            return Err(Failure::internal(format!("a PD worker wrote answer {} of {n}", delta.choice)));
        };
        if sent.ended {
            let text = format!("a PD worker went on with answer {}, which had ended", delta.choice);
            return Err(Failure::internal(text));
        }
        sent.token_ids.extend(&delta.token_ids);
        sent.text_len += delta.text.len() as u64;
        sent.segments = sent.segments.saturating_add(u32::try_from(delta.segments.len()).unwrap_or(u32::MAX));
        sent.ended = ends;
        Ok(())
    }

    /// The choices of which anything was sent, as a PD worker is given them.
    pub(super) fn resume(&self) -> Vec<v1::ResumedChoice> {
        let began = |sent: &&v1::ResumedChoice| {
            sent.ended || sent.text_len > 0 || sent.segments > 0 || !sent.token_ids.is_empty()
        };
        self.0.iter().filter(began).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_add_up_by_choice_and_untouched_choices_are_left_out() {
        let mut sent = SentAnswer::nothing(3);
        let piece = |choice, token, text: &str| v1::Delta {
            choice,
            token_ids: vec![token],
            text: text.into(),
            ..v1::Delta::default()
        };
        sent.note(&piece(2, 7, "é")).unwrap();
        sent.note(&piece(0, 8, "")).unwrap();
        let end = v1::Delta { finish_reason: v1::FinishReason::Stop.into(), ..piece(2, 9, "b") };
        sent.note(&end).unwrap();
        let resume = sent.resume();
        assert_eq!(resume.len(), 2);
        assert_eq!(
            (resume[0].token_ids.as_slice(), resume[0].text_len, resume[0].ended),
            (&[8][..], 0, false)
        );
        assert_eq!(
            (resume[1].token_ids.as_slice(), resume[1].text_len, resume[1].ended),
            (&[7, 9][..], 3, true)
        );
        assert!(sent.note(&piece(2, 1, "more")).is_err(), "it had ended");
        assert!(sent.note(&piece(3, 1, "")).is_err(), "nobody asked for it");
    }
}
