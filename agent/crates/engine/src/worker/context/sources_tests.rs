use proptest::prelude::*;

use super::*;

const NOTHING: Served = Served { more: false, units: 1 };

fn own(token: u32) -> (Token, Party) {
    (Token(token), Party::Source(Token(token)))
}

/// Serves the next source of `class`, which reads what `takes` returns for it.
fn serve(sources: &mut Sources, class: Class, takes: impl Fn(Token) -> Served) -> Option<Token> {
    let token = sources.next(class)?;
    sources.served(token, takes(token));
    Some(token)
}

#[test]
fn each_source_is_served_once_for_a_mark_and_again_while_it_has_more() {
    let mut sources = Sources::new();
    for (token, party) in [own(1), own(2), own(1)] {
        sources.add(token, Class::Underlay, party);
    }
    assert_eq!((sources.count(Class::Underlay), sources.is_empty()), (2, false));
    let more = |token| Served { more: token == Token(2), units: 32 };
    let served: Vec<_> = (0..4).map(|_| serve(&mut sources, Class::Underlay, more)).collect();
    assert_eq!(served, [Some(Token(1)), Some(Token(2)), Some(Token(2)), Some(Token(2))]);
    serve(&mut sources, Class::Underlay, |_| NOTHING);
    assert!(sources.is_empty() && sources.next(Class::Underlay).is_none());
}

#[test]
fn a_source_that_reads_large_batches_gets_no_more_than_one_that_reads_small_ones() {
    let mut sources = Sources::new();
    for (token, party) in [own(1), own(2)] {
        sources.add(token, Class::Local, party);
    }
    let takes = |token| Served { more: true, units: if token == Token(1) { 1_800 } else { 32 } };
    let mut taken = [0, 0];
    for _ in 0..10_000 {
        let token = serve(&mut sources, Class::Local, takes).unwrap();
        taken[token.0 as usize - 1] += i64::from(takes(token).units);
    }
    assert!((taken[0] - taken[1]).abs() <= 1_800 + QUANTUM, "{taken:?}");
}

#[test]
fn a_source_that_has_little_is_served_once_in_a_round_like_all_others() {
    let mut sources = Sources::new();
    for (token, party) in [own(1), own(2)] {
        sources.add(token, Class::Underlay, party);
    }
    let takes = |token| Served { more: true, units: if token == Token(1) { 32 } else { 4 } };
    let served: Vec<u32> = (0..100).map(|_| serve(&mut sources, Class::Underlay, takes).unwrap().0).collect();
    assert!(served.chunks(2).all(|round| round == [1, 2]), "{served:?}");
}

#[test]
fn a_peer_with_a_thousand_sources_gets_no_more_than_one_with_a_single_one() {
    let mut sources = Sources::new();
    for token in 0..1_000 {
        sources.add(Token(token), Class::Local, Party::Peer(PeerId(1)));
    }
    sources.add(Token(5_000), Class::Local, Party::Peer(PeerId(2)));
    let served =
        (0..4_000).map(|_| serve(&mut sources, Class::Local, |_| Served { more: true, units: 32 }).unwrap());
    let single = served.filter(|token| *token == Token(5_000)).count();
    assert!((1_999..=2_001).contains(&single), "{single} of 4000");
}

#[test]
fn a_source_that_read_while_no_other_waited_has_no_debt() {
    let mut sources = Sources::new();
    let (token, party) = own(1);
    sources.add(token, Class::Local, party);
    for _ in 0..100 {
        serve(&mut sources, Class::Local, |_| Served { more: true, units: 1_800 });
    }
    let (second, party) = own(2);
    sources.add(second, Class::Local, party);
    let next: Vec<_> =
        (0..4).map(|_| serve(&mut sources, Class::Local, |_| Served { more: true, units: 32 })).collect();
    assert_eq!(next.iter().flatten().filter(|served| **served == token).count(), 2, "{next:?}");
}

#[test]
fn a_source_that_comes_and_goes_pays_its_debt_to_those_that_stayed() {
    let mut sources = Sources::new();
    let ((bursts, bursting), (steady, waiting)) = (own(1), own(2));
    sources.add(steady, Class::Local, waiting);
    let mut taken = [0_u32, 0];
    for _ in 0..2_000 {
        sources.add(bursts, Class::Local, bursting);
        // The bursting source empties its queue in one call each time.
        let takes = |token| {
            if token == bursts {
                Served { more: false, units: 1_000 }
            } else {
                Served { more: true, units: 32 }
            }
        };
        let token = serve(&mut sources, Class::Local, takes).unwrap();
        taken[usize::from(token == steady)] += takes(token).units;
    }
    assert!(taken[1] >= taken[0] * 9 / 10, "{taken:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn each_waiting_source_is_served_as_much_as_the_others(
        batches in proptest::collection::vec((0..3_u32, 32..2_000_u32), 2..8),
    ) {
        // Each source belongs to a peer and reads batches of its own size for ever.
        let mut sources = Sources::new();
        for (token, (peer, _)) in (0..).map(Token).zip(&batches) {
            sources.add(token, Class::Local, Party::Peer(PeerId(*peer)));
        }
        let mut taken = vec![0_i64; batches.len()];
        for _ in 0..5_000 {
            let token = sources.next(Class::Local).unwrap();
            let units = batches[token.0 as usize].1;
            taken[token.0 as usize] += i64::from(units);
            sources.served(token, Served { more: true, units });
        }
        let of_peer = |peer: u32| -> i64 {
            batches.iter().zip(&taken).filter(|((owner, _), _)| *owner == peer).map(|(_, taken)| *taken).sum()
        };
        let largest = i64::from(batches.iter().map(|(_, units)| *units).max().unwrap()) + QUANTUM;
        for (index, (peer, _)) in batches.iter().enumerate() {
            for (other, (owner, _)) in batches.iter().enumerate() {
                // Each source may be a batch and a quantum ahead of its share, and so may its peer.
                prop_assert!((of_peer(*peer) - of_peer(*owner)).abs() <= 2 * largest, "{taken:?} of {batches:?}");
                if peer == owner {
                    prop_assert!((taken[index] - taken[other]).abs() <= 2 * largest, "{taken:?} of {batches:?}");
                }
            }
        }
    }

    #[test]
    fn no_source_is_forgotten_or_served_without_need(
        steps in proptest::collection::vec((0..6_u32, 0..3_usize, 1..100_u32, any::<bool>()), 0..200),
    ) {
        let classes = [Class::Underlay, Class::Local, Class::Device];
        let mut sources = Sources::new();
        let mut marked = std::collections::BTreeSet::new();
        for (source, class, units, more) in steps {
            let token = Token(source + 10 * class as u32);
            if more {
                sources.add(token, classes[class], Party::Peer(PeerId(source % 2)));
                marked.insert(token.0);
            } else {
                let served = serve(&mut sources, classes[class], |_| Served { more: units % 2 == 0, units });
                prop_assert_eq!(served.is_none(), !marked.iter().any(|token| token / 10 == class as u32));
                if let Some(token) = served {
                    prop_assert!(marked.contains(&token.0));
                    if units % 2 == 1 {
                        marked.remove(&token.0);
                    }
                }
            }
            prop_assert_eq!(sources.is_empty(), marked.is_empty());
            prop_assert_eq!(classes.map(|class| sources.count(class)).iter().sum::<usize>(), marked.len());
        }
    }
}
