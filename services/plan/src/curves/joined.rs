//! Curves of two engines joined: encoder workers of ours before a PD worker that was measured through its API.

use super::source::{ApiEncoders, ApiSource, Unmeasured};
use super::{CostCurves, ProxyCost};
use thiserror::Error;

/// Curves that cannot be joined.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum JoinError {
    /// The PD worker is one of ours.
    #[error("curves of a worker of ours; allowed are those that `triptych profile --url` wrote")]
    NotApi,
    /// The encoder's curves are another engine's.
    #[error("the encoders' curves were measured through an API; allowed are those of a worker of ours")]
    NotOurs,
    /// Two models.
    #[error("the model is {pd:?}, that of the encoders {encoders:?}; both must serve it under one name")]
    Models {
        /// Model of the PD worker.
        pd: String,
        /// Model of the encoders.
        encoders: String,
    },
    /// Workers of different sizes.
    #[error("{pd} threads, and the encoders have {encoders}; workers of a plan are of one size")]
    Threads {
        /// Threads of the PD worker.
        pd: usize,
        /// Threads of an encoder.
        encoders: usize,
    },
    /// The model has no encoder.
    #[error("the encoders' curves have no encodes")]
    NoEncoder,
}

impl CostCurves {
    /// Curves of a cluster with these encoders and another engine's PD workers. What the API of those did not show of encoder
    /// outputs is as it is with ours; their requests take longer by what a request takes beside its steps.
    ///
    /// # Errors
    /// [`JoinError`].
    pub fn joined_to(&self, pd: &Self) -> Result<Self, JoinError> {
        let source = pd.api.as_ref().ok_or(JoinError::NotApi)?;
        if self.api.is_some() {
            return Err(JoinError::NotOurs);
        }
        if self.model != pd.model {
            return Err(JoinError::Models { pd: pd.model.clone(), encoders: self.model.clone() });
        }
        if self.threads != pd.threads {
            return Err(JoinError::Threads { pd: pd.threads, encoders: self.threads });
        }
        if self.encode.is_empty() {
            return Err(JoinError::NoEncoder);
        }
        let from_ours = [
            Unmeasured::Encode,
            Unmeasured::Preprocess,
            Unmeasured::Publish,
            Unmeasured::Load,
            Unmeasured::RowBytes,
            Unmeasured::Frontend,
            Unmeasured::Colocated,
        ];
        let unmeasured = source.unmeasured.iter().copied().filter(|one| !from_ours.contains(one)).collect();
        Ok(Self {
            step: pd.step.clone(),
            between_steps_us: pd.between_steps_us,
            pipelining: pd.pipelining,
            kv: pd.kv,
            kv_dtype: pd.kv_dtype.clone(),
            proxy: ProxyCost {
                request_us: self.proxy.request_us + pd.proxy.request_us,
                token_us: self.proxy.token_us + pd.proxy.token_us,
                ..self.proxy
            },
            api: Some(ApiSource { encoders: ApiEncoders::Ours, unmeasured, ..source.clone() }),
            ..self.clone()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::PipeliningSaves;
    use super::super::sample::{Costs, curves, curves_of};
    use super::*;

    fn pd() -> CostCurves {
        let slow = curves_of(&Costs { step_fixed: 9000.0, encode_token: 900.0, ..Costs::default() });
        let unmeasured = vec![Unmeasured::Load, Unmeasured::MixedSteps];
        let source = ApiSource {
            engine: Some("vLLM 0.32".into()),
            url: "http://gpu:8000".into(),
            encoders: ApiEncoders::Colocated,
            kv_block_tokens: Some(16),
            max_sequences: None,
            unmeasured,
        };
        let proxy = ProxyCost { request_us: 1500.0, ..ProxyCost::default() };
        CostCurves { api: Some(source), proxy, ..slow }
    }

    #[test]
    fn encodes_are_ours_and_steps_the_other_engines() {
        let pipelining = Some(PipeliningSaves { fixed_us: 50.0, each_us: 2.0 });
        let ours = CostCurves { between_steps_us: 40.0, pipelining, ..curves() };
        let joined = ours.joined_to(&pd()).unwrap();
        assert_eq!((&joined.encode, &joined.load), (&curves().encode, &curves().load));
        assert_eq!(joined.step, pd().step);
        // Times that were measured through an API hold what is between steps, and what pipelining saves.
        assert_eq!((joined.between_steps_us, joined.pipelining), (0.0, None));
        assert_eq!(joined.proxy.request_us, curves().proxy.request_us + 1500.0);
        let source = joined.api.clone().unwrap();
        assert_eq!((source.encoders, source.unmeasured), (ApiEncoders::Ours, vec![Unmeasured::MixedSteps]));
        let text = serde_json::to_string(&joined).unwrap();
        assert_eq!(CostCurves::read(&text).unwrap(), joined);
    }

    #[test]
    fn curves_that_are_no_pair_are_refused_with_both_values() {
        let other = |change: fn(&mut CostCurves)| {
            let mut pd = pd();
            change(&mut pd);
            curves().joined_to(&pd).unwrap_err().to_string()
        };
        assert!(other(|pd| pd.api = None).contains("profile --url"));
        assert!(other(|pd| pd.model = "m".into()).contains("\"m\", that of the encoders \"made by hand\""));
        assert!(other(|pd| pd.threads = 3).contains("3 threads, and the encoders have 1"));
        assert_eq!(pd().joined_to(&pd()), Err(JoinError::NotOurs));
        let text_only = CostCurves { encode: Vec::new(), ..curves() };
        assert_eq!(text_only.joined_to(&pd()), Err(JoinError::NoEncoder));
    }
}
