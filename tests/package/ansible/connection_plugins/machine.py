"""Ansible's connection to a machine of tests/package/distributions: its process 1, as this host numbers it, is the variable
culvert_machine."""

import pathlib
import shutil
import subprocess

from ansible.plugins.connection import ConnectionBase

DOCUMENTATION = """
name: machine
short_description: runs in the namespaces of a process
description: [runs in the namespaces of a process]
options:
  init:
    description: the process
    vars: [{name: culvert_machine}]
"""


class Connection(ConnectionBase):
    transport = "machine"
    has_pipelining = False

    def _connect(self):
        self._connected = True
        return self

    def exec_command(self, cmd, in_data=None, sudoable=True):
        super().exec_command(cmd, in_data=in_data, sudoable=sudoable)
        words = ["nsenter", "--target", str(self.get_option("init")), "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--root",
                 "--wd", "--", "env", "-i", "HOME=/root", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "/bin/sh", "-c", cmd]
        done = subprocess.run(words, input=in_data, capture_output=True)
        return done.returncode, done.stdout, done.stderr

    def path(self, path):
        return pathlib.Path(f"/proc/{self.get_option('init')}/root") / path.lstrip("/")

    def put_file(self, in_path, out_path):
        shutil.copyfile(in_path, self.path(out_path))

    def fetch_file(self, in_path, out_path):
        shutil.copyfile(self.path(in_path), out_path)

    def close(self):
        self._connected = False
