//! Row indices of the images of a run.
//!
//! Rows of one image: its tiles one after the other, each the class row and then its patches; then the tiles that it does
//! not have; then the rows that fill every tile up to a multiple of [`FILL`].

use crate::encoder::units::EncodeUnit;
use crate::spec::TilesSpec;

/// Rows of a tile are filled up to a multiple of this.
const FILL: usize = 8;

/// The tiles of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::encoder) struct TiledImage {
    /// Tiles of the image.
    pub n_tiles: usize,
    /// Its arrangement as an index into tables, from 1.
    pub arrangement: usize,
}

impl TiledImage {
    /// Tiles of a unit whose grid is (tiles down, tiles across, rows of a tile); an arrangement that the encoder does not
    /// have, which [`units`](crate::encoder::units::units) refuses, would be 0.
    pub fn of(tiles: &TilesSpec, unit: &EncodeUnit<'_>) -> Self {
        let [down, across, _] = unit.grid;
        let arrangement = tiles.arrangements().iter().position(|a| *a == [down, across]).map_or(0, |i| i + 1);
        Self { n_tiles: down * across, arrangement }
    }
}

/// Row indices of a run.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::encoder) struct TileRows {
    /// All rows, filling included.
    pub n_rows: usize,
    /// For each image: rows of the tiles that it has, and all its rows.
    pub images: Vec<[usize; 2]>,
    /// Rows of tiles among all rows, the tiles that images do not have too.
    pub placed: Vec<u32>,
    /// Patches among the rows of `placed`.
    pub patches: Vec<u32>,
    /// Row of the first tile table for each of `placed`.
    pub before: Vec<u32>,
    /// Row of the position table for each of `placed`.
    pub places: Vec<u32>,
    /// Row of the tile position table for each of `placed`.
    pub tile_places: Vec<u32>,
    /// Row of the second tile table for each row.
    pub after: Vec<u32>,
    /// Rows that are output, in order.
    pub output: Vec<u32>,
}

impl TileRows {
    /// Indices for a captured forward of `n_images`: padding up to it, patches of the tiles that images do not have too, and as
    /// many output rows as these images can have.
    pub fn padded(tiles: &TilesSpec, images: &[TiledImage], n_images: usize) -> Self {
        let mut all = images.to_vec();
        all.resize(n_images.max(images.len()), TiledImage { n_tiles: 1, arrangement: 1 });
        let mut rows = Self::of(tiles, &all);
        let is_patch = |(i, place): (usize, &u32)| (*place > 0).then_some(i as u32);
        rows.patches = rows.places.iter().enumerate().filter_map(is_patch).collect();
        rows.output.resize(all.len() * tiles.max_tiles * tiles.tile_rows(), 0);
        rows
    }

    /// Indices for these images.
    pub fn of(tiles: &TilesSpec, images: &[TiledImage]) -> Self {
        let n_tiles = tiles.max_tiles;
        let tile_rows = tiles.tile_rows();
        let n_filling = tile_rows.next_multiple_of(FILL) - tile_rows;
        let class = ((tiles.arrangements().len() + 1) * n_tiles) as u32;
        let mut rows = Self::default();
        for image in images {
            let first = rows.n_rows;
            for tile in 0..n_tiles {
                let table = (image.arrangement * n_tiles + tile) as u32;
                for place in 0..tile_rows {
                    if place > 0 && tile < image.n_tiles {
                        rows.patches.push(rows.placed.len() as u32);
                    }
                    rows.placed.push((first + tile * tile_rows + place) as u32);
                    rows.before.push(if place == 0 { class } else { table });
                    rows.places.push(place as u32);
                    rows.tile_places.push(table * tile_rows as u32 + place as u32);
                    rows.after.push(table);
                }
            }
            for tile in 0..n_tiles {
                rows.after
                    .extend(std::iter::repeat_n((image.arrangement * n_tiles + tile) as u32, n_filling));
            }
            let n_seen = image.n_tiles * tile_rows;
            rows.output.extend((first..first + n_seen).map(|row| row as u32));
            rows.n_rows = rows.after.len();
            rows.images.push([n_seen, rows.n_rows - first]);
        }
        rows
    }
}
