def report(found):
    return str(len(found))
