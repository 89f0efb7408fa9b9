//! A table that gives out the places of its members, and gives memory back where none are left.
//!
//! ```text
//!   pages   [ 0 ]   [ 1 ]   [ 2 ]   ...     16 places each; a page without members is freed by `shrink`
//!             │               │
//!             ▼               ▼
//!           members         members         place = 16 * page + slot
//! ```
//!
//! A vector of members, as `slab` has it, cannot become shorter than its last member's place: one flow that began while a peer had
//! 25,000 kept 1.6 MB of each table. Here it keeps a page. A look-up costs one more load, from an array with a pointer for each page.

/// The number of places that a page has.
const PAGE: usize = 16;

/// Members by their places. The place of a removed member is given out again.
#[derive(Debug)]
pub struct Pages<T> {
    pages: Vec<Option<Box<Page<T>>>>,
    /// The pages with a vacant place, freed ones included. Places are taken from the last of them.
    vacant: Vec<u32>,
    len: usize,
}

#[derive(Debug)]
struct Page<T> {
    places: [Slot<T>; PAGE],
    members: u8,
    /// The vacant place that is taken next, [`PAGE`] if there is none.
    next: u8,
}

#[derive(Debug)]
enum Slot<T> {
    Member(T),
    /// The vacant place to be taken after this one.
    Vacant(u8),
}

impl<T> Slot<T> {
    fn member(&self) -> Option<&T> {
        match self {
            Self::Member(member) => Some(member),
            Self::Vacant(_) => None,
        }
    }

    fn member_mut(&mut self) -> Option<&mut T> {
        match self {
            Self::Member(member) => Some(member),
            Self::Vacant(_) => None,
        }
    }
}

impl<T> Page<T> {
    fn new() -> Box<Self> {
        // A page has fewer places than a byte counts.
        let places = std::array::from_fn(|slot| Slot::Vacant(slot as u8 + 1));
        Box::new(Self { places, members: 0, next: 0 })
    }

    fn is_full(&self) -> bool {
        usize::from(self.next) == PAGE
    }
}

impl<T> Default for Pages<T> {
    fn default() -> Self {
        Self { pages: Vec::new(), vacant: Vec::new(), len: 0 }
    }
}

impl<T> Pages<T> {
    /// The number of members, whatever the number of places.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no place has a member.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The number of places in pages that are not freed.
    #[must_use]
    pub fn capacity(&self) -> usize {
        PAGE * self.pages.iter().flatten().count()
    }

    /// One above the last place that may have a member.
    #[must_use]
    pub fn end(&self) -> usize {
        PAGE * self.pages.len()
    }

    /// The place that [`Pages::insert`] will give the next member.
    #[must_use]
    pub fn next_place(&self) -> usize {
        let page = self.vacant.last().map_or(self.pages.len(), |page| *page as usize);
        let next = self.pages.get(page).and_then(Option::as_ref).map_or(0, |page| page.next);
        page * PAGE + usize::from(next)
    }

    /// Adds a member and returns its place.
    pub fn insert(&mut self, member: T) -> usize {
        let place = self.next_place();
        let (index, slot) = (place / PAGE, place % PAGE);
        if index == self.pages.len() {
            self.pages.push(None);
            // 2^32 pages would not fit into any memory.
            self.vacant.push(index as u32);
        }
        let page = self.pages[index].get_or_insert_with(Page::new);
        if let Slot::Vacant(next) = page.places[slot] {
            page.next = next;
        }
        page.places[slot] = Slot::Member(member);
        page.members += 1;
        if page.is_full() {
            self.vacant.pop();
        }
        self.len += 1;
        place
    }

    /// The member at a place, if there is one.
    #[inline]
    #[must_use]
    pub fn get(&self, place: usize) -> Option<&T> {
        self.pages.get(place / PAGE)?.as_ref()?.places[place % PAGE].member()
    }

    /// The member at a place, if there is one, to be changed.
    #[inline]
    pub fn get_mut(&mut self, place: usize) -> Option<&mut T> {
        self.pages.get_mut(place / PAGE)?.as_mut()?.places[place % PAGE].member_mut()
    }

    /// Removes a member; its place may be given to another.
    pub fn remove(&mut self, place: usize) -> Option<T> {
        let (index, slot) = (place / PAGE, place % PAGE);
        let page = self.pages.get_mut(index)?.as_mut()?;
        page.places[slot].member()?;
        let was_full = page.is_full();
        let removed = std::mem::replace(&mut page.places[slot], Slot::Vacant(page.next));
        page.next = slot as u8;
        page.members -= 1;
        if was_full {
            self.vacant.push(index as u32);
        }
        self.len -= 1;
        match removed {
            Slot::Member(member) => Some(member),
            Slot::Vacant(_) => None,
        }
    }

    /// Frees the memory of pages that have no members.
    pub fn shrink(&mut self) {
        for page in &mut self.pages {
            if page.as_ref().is_some_and(|page| page.members == 0) {
                *page = None;
            }
        }
        while self.pages.pop_if(|page| page.is_none()).is_some() {}
        let pages = self.pages.len();
        self.vacant.retain(|page| (*page as usize) < pages);
        self.pages.shrink_to(2 * pages);
        self.vacant.shrink_to(2 * pages);
    }

    /// The members with their places, in the order of those.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &T)> {
        let pages = self.pages.iter().enumerate().filter_map(|(index, page)| Some((index, page.as_ref()?)));
        pages.flat_map(|(index, page)| {
            let places = page.places.iter().enumerate();
            places.filter_map(move |(slot, place)| Some((index * PAGE + slot, place.member()?)))
        })
    }

    /// Iterates over the members with their places, to change them.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (usize, &mut T)> {
        let pages =
            self.pages.iter_mut().enumerate().filter_map(|(index, page)| Some((index, page.as_mut()?)));
        pages.flat_map(|(index, page)| {
            let places = page.places.iter_mut().enumerate();
            places.filter_map(move |(slot, place)| Some((index * PAGE + slot, place.member_mut()?)))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn one_late_member_keeps_one_page() {
        let mut pages = Pages::default();
        for number in 0..25_000 {
            assert_eq!(pages.insert(number), number);
        }
        (0..24_999).for_each(|place| assert_eq!(pages.remove(place), Some(place)));
        pages.shrink();
        assert_eq!((pages.len(), pages.get(24_999)), (1, Some(&24_999)));
        assert_eq!((pages.capacity(), pages.end()), (PAGE, 25_008));
        pages.remove(24_999);
        pages.shrink();
        assert_eq!((pages.capacity(), pages.end(), pages.len()), (0, 0, 0));
    }

    #[test]
    fn the_place_that_was_left_last_is_given_out_first() {
        let mut pages = Pages::default();
        (0..10).for_each(|number| assert_eq!(pages.insert(number), number));
        for place in [3, 7, 5] {
            pages.remove(place);
        }
        assert_eq!([(); 4].map(|()| pages.insert(0)), [5, 7, 3, 10]);
    }

    #[derive(Clone, Debug)]
    enum Step {
        Insert(u16),
        /// Removes every so many members, from the first.
        Remove {
            step: usize,
            count: usize,
        },
        Shrink,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (1..200_u16).prop_map(Step::Insert),
            (1..9_usize, 1..300_usize).prop_map(|(step, count)| Step::Remove { step, count }),
            Just(Step::Shrink),
        ]
    }

    proptest! {
        /// What a map does whose keys are given out by the table.
        #[test]
        fn members_stay_at_their_places(steps in prop::collection::vec(step(), 1..40)) {
            let (mut pages, mut model, mut number) = (Pages::default(), BTreeMap::new(), 0_u32);
            for step in steps {
                match step {
                    Step::Insert(count) => for _ in 0..count {
                        number += 1;
                        let next = pages.next_place();
                        prop_assert_eq!(pages.insert(number), next);
                        prop_assert_eq!(model.insert(next, number), None);
                    },
                    Step::Remove { step, count } => {
                        let places: Vec<usize> = model.keys().copied().step_by(step).take(count).collect();
                        for place in places {
                            prop_assert_eq!(pages.remove(place), model.remove(&place));
                            prop_assert_eq!(pages.remove(place), None);
                        }
                    }
                    Step::Shrink => {
                        pages.shrink();
                        prop_assert!(pages.capacity() <= PAGE * model.len());
                    }
                }
                prop_assert_eq!(pages.len(), model.len());
                prop_assert!(pages.iter().map(|(place, member)| (place, *member)).eq(model.clone()));
                prop_assert!(pages.iter_mut().map(|(place, member)| (place, *member)).eq(model.clone()));
                for (place, member) in &mut model {
                    *member += 1;
                    *pages.get_mut(*place).unwrap() += 1;
                    prop_assert_eq!(pages.get(*place), Some(&*member));
                }
            }
        }
    }
}
