//! Values of forwards, handed out to the items that they are of.

use super::units::EncodeUnit;
use std::ops::Range;

/// Output values of forwards, and where those of each unit are.
#[derive(Debug, Default)]
pub(super) struct Outputs {
    forwards: Vec<Vec<f32>>,
    /// Units by their index, each with its forward and its place there.
    units: Vec<(usize, Place)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Place {
    forward: usize,
    values: Range<usize>,
}

impl Outputs {
    /// Adds the values of a forward over units, which are named by their index and their number of values.
    pub fn add(&mut self, values: Vec<f32>, units: impl Iterator<Item = (usize, usize)>) {
        let forward = self.forwards.len();
        let mut end = 0;
        for (unit, n_values) in units {
            let start = end;
            end = (start + n_values).min(values.len());
            self.units.push((unit, Place { forward, values: start..end }));
        }
        self.forwards.push(values);
    }

    /// The values of each item, from those of its units in their order. An item that has a forward to itself takes its values
    /// without a copy.
    pub fn by_item(mut self, units: &[EncodeUnit<'_>], n_items: usize) -> Vec<Vec<f32>> {
        self.units.sort_unstable_by_key(|(unit, _)| *unit);
        let mut places: Vec<Vec<Place>> = vec![Vec::new(); n_items];
        for (unit, place) in std::mem::take(&mut self.units) {
            let Some(of_item) = units.get(unit).and_then(|unit| places.get_mut(unit.item)) else { continue };
            match of_item.last_mut() {
                Some(last) if last.forward == place.forward && last.values.end == place.values.start => {
                    last.values.end = place.values.end;
                }
                _ => of_item.push(place),
            }
        }
        places.iter().map(|of_item| self.item(of_item)).collect()
    }

    fn item(&mut self, places: &[Place]) -> Vec<f32> {
        if let [Place { forward, values }] = places
            && *values == (0..self.forwards[*forward].len())
        {
            return std::mem::take(&mut self.forwards[*forward]);
        }
        let mut item = Vec::with_capacity(places.iter().map(|place| place.values.len()).sum());
        for Place { forward, values } in places {
            item.extend_from_slice(&self.forwards[*forward][values.clone()]);
        }
        item
    }
}

#[cfg(test)]
mod tests {
    use super::super::units::UnitValues;
    use super::*;

    /// Units of these items.
    fn units(items: &[usize]) -> Vec<EncodeUnit<'static>> {
        let unit = |&item: &usize| EncodeUnit {
            item,
            adapter: None,
            grid: [1, 1, 1],
            patches: [0; 2],
            values: UnitValues::Tokens(&[]),
        };
        items.iter().map(unit).collect()
    }

    #[test]
    fn an_item_alone_in_its_forward_takes_the_values_themselves() {
        let values = vec![1.0, 2.0, 3.0];
        let place = values.as_ptr();
        let mut outputs = Outputs::default();
        outputs.add(values, [(0, 1), (1, 2)].into_iter());
        let items = outputs.by_item(&units(&[0, 0]), 1);
        assert_eq!((items[0].as_ptr(), &items[0][..]), (place, &[1.0, 2.0, 3.0][..]));
    }

    #[test]
    fn units_of_several_forwards_are_put_together_in_their_order() {
        let mut outputs = Outputs::default();
        // Packs are in no order.
        outputs.add(vec![4.0, 1.0, 2.0], [(3, 1), (0, 2)].into_iter());
        outputs.add(vec![3.0, 5.0], [(2, 1), (1, 1)].into_iter());
        let items = outputs.by_item(&units(&[0, 0, 1, 1]), 3);
        assert_eq!(items, [vec![1.0, 2.0, 5.0], vec![3.0, 4.0], vec![]]);
        assert!(items.iter().all(|item| item.capacity() == item.len()));
    }
}
