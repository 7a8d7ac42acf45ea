p='vmckpt/checkpoint/pager.py'
s=open(p).read()
s=s.replace('''        self.answer()
        for numbers, contents in self._area.stream():
''','''        self.answer()
        self.note("go")
        for numbers, contents in self._area.stream():
''')
s=s.replace('''        self._missing.end()
''','''        self._missing.end()
        self.note("end")
''',1)
s=s.replace('''    def answer(self, wait_ms: int = 0) -> None:
        """Whoever waits for a page gets it, and what is had along with it."""
        while''','''    def note(self, what):
        import time
        open("/tmp/w-checkpoint/build/pagerprof","a").write(f"{what} {time.time():.4f} faults {self.faults} zero {self.zeros} in answer {self.spent:.3f} given {self.given}\\n")

    faults = zeros = given = 0
    spent = 0.0
    def answer(self, wait_ms: int = 0) -> None:
        import time
        t = time.monotonic(); f = self.faults
        self.answer_(wait_ms)
        if self.faults != f: self.spent += time.monotonic() - t
        if self.faults // 100 != f // 100: self.note(" ")

    def answer_(self, wait_ms: int = 0) -> None:
        """Whoever waits for a page gets it, and what is had along with it."""
        while''')
s=s.replace('''                if not self._left[number]:
''','''                self.faults += 1
                if not self._left[number]:
                    self.zeros += 1
''')
s=s.replace('''            data = contents[first * PAGE_BYTES''','''            self.given += count
            data = contents[first * PAGE_BYTES''')
open(p,'w').write(s)
