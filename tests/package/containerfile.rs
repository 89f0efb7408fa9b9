//! A container file as its builder reads it: stages of instructions.

use std::fs;

use crate::repository;

/// A stage: instructions with their arguments, in order.
pub(crate) struct Stage(Vec<(String, String)>);

/// The stage that builds, and the one that becomes the image.
pub(crate) fn stages() -> [Stage; 2] {
    let text = fs::read_to_string(repository("deploy/container/Containerfile")).unwrap();
    let mut stages = Vec::new();
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        assert!(!line.ends_with('\\'), "this reader knows no continued lines: {line}");
        let (instruction, arguments) = line.split_once(' ').unwrap();
        if instruction == "FROM" {
            stages.push(Stage(Vec::new()));
        }
        stages.last_mut().unwrap().0.push((instruction.to_owned(), arguments.to_owned()));
    }
    stages.try_into().unwrap_or_else(|stages: Vec<Stage>| panic!("{} stages", stages.len()))
}

impl Stage {
    /// All instructions in order.
    pub(crate) fn instructions(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(instruction, arguments)| (instruction.as_str(), arguments.as_str()))
    }

    /// The arguments of the one instruction of this kind.
    #[track_caller]
    pub(crate) fn only(&self, instruction: &str) -> &str {
        let mut all = self.instructions().filter(|(each, _)| *each == instruction);
        let (Some((_, arguments)), None) = (all.next(), all.next()) else {
            panic!("one {instruction}, please")
        };
        arguments
    }

    /// The list of words of the one instruction of this kind, which is JSON; options before it are passed over.
    #[track_caller]
    pub(crate) fn words(&self, instruction: &str) -> Vec<String> {
        let arguments = self.only(instruction);
        let list = &arguments[arguments.find('[').unwrap()..];
        serde_json::from_str(list).unwrap()
    }
}
