//! The memory that this process may have: the machine's, or what a control group leaves of it.

use std::{fs, path::Path};

/// The least of `MemTotal` and the limits of the control groups that this process is in, in bytes; `None` where the kernel does not say.
#[must_use]
pub fn memory() -> Option<u64> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let machine = of_machine(&read("/proc/meminfo"));
    let groups = of_groups(&read("/proc/self/cgroup"), Path::new("/sys/fs/cgroup"));
    machine.into_iter().chain(groups).min()
}

fn of_machine(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib << 10)
}

/// The least limit of these groups and those around them: `memory.max` of version 2, `memory.limit_in_bytes` of version 1.
fn of_groups(groups: &str, root: &Path) -> Option<u64> {
    let mut least: Option<u64> = None;
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (top, name) = if controllers.is_empty() {
            (root.to_owned(), "memory.max")
        } else if controllers.split(',').any(|controller| controller == "memory") {
            (root.join(controllers), "memory.limit_in_bytes")
        } else {
            continue;
        };
        for group in Path::new(path.trim_start_matches('/')).ancestors() {
            let text = fs::read_to_string(top.join(group).join(name)).unwrap_or_default();
            // "max" means no limit, and so does the number of version 1 for it, more than any machine has.
            least = least.into_iter().chain(text.trim().parse().ok()).min();
        }
    }
    least
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_limit_of_all_groups_counts() {
        let root = tempfile::tempdir().unwrap();
        let set = |path: &str, value: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, value).unwrap();
        };
        set("memory.max", "max\n");
        set("a/memory.max", "67108864\n");
        set("a/b/memory.max", "max\n");
        set("memory/memory.limit_in_bytes", "9223372036854771712\n");
        set("memory/c/memory.limit_in_bytes", "1048576\n");
        let of = |groups: &str| of_groups(groups, root.path());
        assert_eq!(of("0::/a/b\n"), Some(64 << 20));
        assert_eq!(of("0::/\n"), None);
        assert_eq!(of("4:memory:/c/d\n1:cpu:/c\n"), Some(1 << 20));
        assert_eq!(of("4:memory:/\n0::/a\n"), Some(64 << 20));
        assert_eq!(of("1:cpu:/c\n"), None);
        assert_eq!(of_machine("MemTotal:       24683524 kB\nMemFree: 1 kB\n"), Some(24_683_524 << 10));
        assert_eq!(of_machine(""), None);
        assert!(memory().unwrap() > 1 << 20);
    }
}
