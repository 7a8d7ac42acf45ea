"""Operations as steps with undo."""
