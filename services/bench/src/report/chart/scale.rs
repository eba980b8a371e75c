//! Positions of values along an axis, and its ticks.

/// Scale of an axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scale {
    /// Linear, from zero.
    Linear,
    /// Evenly between two values.
    Between(f64, f64),
    /// Ten times as much is always as far.
    Log,
}

/// An axis that knows its ends.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct AxisRange {
    low: f64,
    high: f64,
    is_log: bool,
    pub(super) ticks: Vec<f64>,
}

impl AxisRange {
    /// An axis for these values; what is not finite, and on a logarithmic one what is not positive, has no place.
    pub(super) fn new(scale: Scale, values: impl Iterator<Item = f64>) -> Self {
        let is_log = scale == Scale::Log;
        let usable = values.filter(|v| v.is_finite() && (!is_log || *v > 0.0));
        let (mut low, mut high) =
            usable.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
        if low > high {
            (low, high) = if is_log { (1.0, 10.0) } else { (0.0, 1.0) };
        }
        match scale {
            Scale::Between(from, to) => Self::even(from, to, (to - from) / 5.0),
            Scale::Linear => {
                let step = nice_step(high.max(0.0) - low.min(0.0));
                Self::even((low.min(0.0) / step).floor() * step, (high / step).ceil().max(1.0) * step, step)
            }
            Scale::Log => Self::log(low, high),
        }
    }

    fn even(low: f64, high: f64, step: f64) -> Self {
        let n = ((high - low) / step).round().clamp(1.0, 20.0) as i32;
        let ticks = (0..=n).map(|i| low + f64::from(i) * step).collect();
        Self { low, high, is_log: false, ticks }
    }

    fn log(low: f64, high: f64) -> Self {
        const WITHIN: [f64; 3] = [1.0, 2.0, 5.0];
        let first = low.log10().floor() as i32;
        let last = high.log10().ceil() as i32;
        let all = (first..=last).flat_map(|e| WITHIN.map(|m| m * 10f64.powi(e)));
        let all: Vec<f64> = all.collect();
        let from = all.iter().rposition(|t| *t <= low * 1.0001).unwrap_or(0);
        let to = all
            .iter()
            .position(|t| *t >= high * 0.9999)
            .unwrap_or(all.len() - 1)
            .max(from + 1)
            .min(all.len() - 1);
        let from = from.min(to - 1);
        let mut ticks = all[from..=to].to_vec();
        let low = ticks[0];
        let high = ticks[ticks.len() - 1];
        if ticks.len() > 9 {
            ticks.retain(|t| (t.log10() - t.log10().round()).abs() < 1e-9);
        }
        Self { low, high, is_log: true, ticks }
    }

    /// Position of a value: 0 to 1 between the ends, outside of that for values beyond them.
    pub(super) fn place(&self, value: f64) -> Option<f64> {
        let of = |v: f64| if self.is_log { v.log10() } else { v };
        let place = (of(value) - of(self.low)) / (of(self.high) - of(self.low));
        place.is_finite().then_some(place)
    }
}

/// A step of 1, 2 or 5 times a power of ten, for about five ticks.
fn nice_step(range: f64) -> f64 {
    let rough = (range / 5.0).max(1e-9);
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().find(|m| m * power >= rough * 0.999);
    step.unwrap_or(10.0) * power
}

/// A tick's number: as short as it is exact.
pub(super) fn number(value: f64) -> String {
    let text = match value.abs() {
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.3}"),
    };
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ticks(scale: Scale, values: &[f64]) -> Vec<String> {
        AxisRange::new(scale, values.iter().copied()).ticks.iter().map(|t| number(*t)).collect()
    }

    #[test]
    fn ticks_are_round_and_hold_all_values() {
        assert_eq!(ticks(Scale::Linear, &[3.0, 17.0]), ["0", "5", "10", "15", "20"]);
        assert_eq!(ticks(Scale::Linear, &[0.3]), ["0", "0.1", "0.2", "0.3"]);
        assert_eq!(ticks(Scale::Log, &[42.0, 900.0]), ["20", "50", "100", "200", "500", "1000"]);
        assert_eq!(ticks(Scale::Log, &[1.0, 50_000.0]), ["1", "10", "100", "1000", "10000"]);
        assert_eq!(ticks(Scale::Between(0.0, 1.0), &[7.0]), ["0", "0.2", "0.4", "0.6", "0.8", "1"]);
    }

    #[test]
    fn no_values_and_odd_ones_have_an_axis_too() {
        for scale in [Scale::Linear, Scale::Log] {
            for values in [&[][..], &[f64::NAN, f64::INFINITY], &[0.0], &[5.0], &[1e-9], &[0.0, 0.0]] {
                let span = AxisRange::new(scale, values.iter().copied());
                assert!(span.ticks.len() >= 2 && span.low < span.high, "{scale:?} {values:?}: {span:?}");
            }
        }
    }

    #[test]
    fn a_value_between_the_ends_is_between_them() {
        let span = AxisRange::new(Scale::Log, [10.0, 1000.0].into_iter());
        assert_eq!(span.place(100.0), Some(0.5));
        assert_eq!(span.place(0.0), None);
        assert_eq!(AxisRange::new(Scale::Linear, [10.0].into_iter()).place(5.0), Some(0.5));
    }
}
