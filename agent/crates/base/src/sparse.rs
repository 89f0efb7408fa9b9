//! Tables that grew for a load that is over: they are made smaller, so that one peer's thousands of flows do not cost memory for months.

use std::{
    collections::HashMap,
    hash::{BuildHasher, Hash},
};

/// Places of a table that are never worth giving back.
const KEPT: usize = 128;

/// Whether a table with room for `capacity` members holds so few that it should be made smaller.
#[must_use]
pub fn is_sparse(len: usize, capacity: usize) -> bool {
    capacity > KEPT && capacity / 8 > len
}

/// Makes a list smaller that is sparse.
pub fn shrink_list<T>(list: &mut Vec<T>) {
    if is_sparse(list.len(), list.capacity()) {
        list.shrink_to(2 * list.len());
    }
}

/// Makes a map smaller that is sparse. Moves what is in it: at most an eighth of what it had room for.
pub fn shrink<K: Eq + Hash, V, S: BuildHasher>(map: &mut HashMap<K, V, S>) {
    if is_sparse(map.len(), map.capacity()) {
        map.shrink_to(2 * map.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_shrinks_when_few_are_left_and_keeps_them() {
        let mut map: HashMap<u32, u32> = (0..20_000).map(|number| (number, number)).collect();
        let full = map.capacity();
        map.retain(|number, _| *number < 10_000);
        shrink(&mut map);
        assert!(map.capacity() > full / 2, "half of them may come back: {} of {full}", map.capacity());
        map.retain(|number, _| *number < 100);
        shrink(&mut map);
        assert!(map.capacity() < 4 * KEPT, "{}", map.capacity());
        assert!((0..100).all(|number| map.get(&number) == Some(&number)));
    }
}
